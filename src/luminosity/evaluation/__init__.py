"""Evaluates predictions, and describes the columns of tables, in pipelines, in memory and from the command line.

Every name is imported when it is first used, because Beam takes long to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luminosity.evaluation.description.describe_table import Describe, describe
    from luminosity.evaluation.description.result import ColumnChange, ColumnDescription, Description, Histogram
    from luminosity.evaluation.evaluate_table import Evaluate, evaluate
    from luminosity.evaluation.evaluation import Evaluation
    from luminosity.evaluation.result import CalibrationBin, ClassMetrics, Confusion, Metric

__all__ = [
    "CalibrationBin",
    "ClassMetrics",
    "ColumnChange",
    "ColumnDescription",
    "Confusion",
    "Describe",
    "Description",
    "Evaluate",
    "Evaluation",
    "Histogram",
    "Metric",
    "describe",
    "evaluate",
]

_NAMES_BY_MODULE = {
    "description.describe_table": ["Describe", "describe"],
    "description.result": ["ColumnChange", "ColumnDescription", "Description", "Histogram"],
    "evaluate_table": ["Evaluate", "evaluate"],
    "evaluation": ["Evaluation"],
    "result": ["CalibrationBin", "ClassMetrics", "Confusion", "Metric"],
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
