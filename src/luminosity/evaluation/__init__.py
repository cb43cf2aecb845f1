"""Evaluates predictions, and describes the columns of tables, in pipelines, in memory and from the command line.

Every name is imported when it is first used, because Beam takes long to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from luminosity._shared.lazy import lazy_names

if TYPE_CHECKING:
    from luminosity.evaluation.description.describe_table import Describe, describe
    from luminosity.evaluation.description.result import ColumnChange, ColumnDescription, Description, Histogram
    from luminosity.evaluation.evaluate_table import Evaluate, evaluate
    from luminosity.evaluation.evaluation import Evaluation
    from luminosity.evaluation.result import CalibrationBin, ClassMetrics, Confusion, Metric, Outcomes

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
    "Outcomes",
    "describe",
    "evaluate",
]

if not TYPE_CHECKING:  # so that a type checker reports names that don't exist
    __getattr__, __dir__ = lazy_names(__name__)
