"""Whether two sets of embeddings come from one distribution: at once, in a pipeline, or as they arrive.

Everything here is imported when it is first used: JAX is large.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luminosity.drift.kernels import RBF, BlockKernel, Kernel, Laplacian, Linear, Polynomial, RowKernel
    from luminosity.drift.mmd import mmd2, mmd_test
    from luminosity.drift.online.autocorrelation import AutocorrelationWarning
    from luminosity.drift.online.contract import OnlineDetector
    from luminosity.drift.online.detector import OnlineMMD
    from luminosity.drift.online.streams import DriftAlert
    from luminosity.drift.online.transform import DetectDrift
    from luminosity.drift.result import KernelResult, MMDTestResult

__all__ = [
    "RBF",
    "AutocorrelationWarning",
    "BlockKernel",
    "DetectDrift",
    "DriftAlert",
    "Kernel",
    "KernelResult",
    "Laplacian",
    "Linear",
    "MMDTestResult",
    "OnlineDetector",
    "OnlineMMD",
    "Polynomial",
    "RowKernel",
    "mmd2",
    "mmd_test",
]

_HOMES = {
    **dict.fromkeys(["RBF", "BlockKernel", "Kernel", "Laplacian", "Linear", "Polynomial", "RowKernel"], "kernels"),
    **dict.fromkeys(["KernelResult", "MMDTestResult"], "result"),
    "AutocorrelationWarning": "online.autocorrelation",
    "OnlineDetector": "online.contract",
    "OnlineMMD": "online.detector",
    "DetectDrift": "online.transform",
    "DriftAlert": "online.streams",
    **dict.fromkeys(["mmd2", "mmd_test"], "mmd"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
