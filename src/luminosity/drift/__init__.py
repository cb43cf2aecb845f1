"""Whether two sets of embeddings come from one distribution: at once, in a pipeline, or as they arrive.

Everything here is imported when it is first used: JAX is large.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luminosity.drift.aggregate import Aggregate
    from luminosity.drift.history import DriftHistory, PastTest
    from luminosity.drift.kernels import RBF, BlockKernel, Kernel, Laplacian, Linear, Polynomial, RowKernel
    from luminosity.drift.mmd import mmd2, mmd_test
    from luminosity.drift.pca import PCA, PCASums
    from luminosity.drift.report.write import write_report
    from luminosity.drift.result import KernelResult, MMDTestResult
    from luminosity.drift.witness_function import witness

__all__ = [
    "PCA",
    "RBF",
    "Aggregate",
    "BlockKernel",
    "DriftHistory",
    "Kernel",
    "KernelResult",
    "Laplacian",
    "Linear",
    "MMDTestResult",
    "PCASums",
    "PastTest",
    "Polynomial",
    "RowKernel",
    "mmd2",
    "mmd_test",
    "witness",
    "write_report",
]

_HOMES = {
    "Aggregate": "aggregate",
    **dict.fromkeys(["RBF", "BlockKernel", "Kernel", "Laplacian", "Linear", "Polynomial", "RowKernel"], "kernels"),
    **dict.fromkeys(["KernelResult", "MMDTestResult"], "result"),
    **dict.fromkeys(["mmd2", "mmd_test"], "mmd"),
    **dict.fromkeys(["DriftHistory", "PastTest"], "history"),
    "witness": "witness_function",
    "write_report": "report.write",
    **dict.fromkeys(["PCA", "PCASums"], "pca"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
