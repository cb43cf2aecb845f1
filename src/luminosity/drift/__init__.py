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
    from luminosity.drift.online.autocorrelation import AutocorrelationWarning
    from luminosity.drift.online.detect_drift import DetectDrift
    from luminosity.drift.online.detector import OnlineDetector, OnlineMMD
    from luminosity.drift.online.streams import DriftAlert
    from luminosity.drift.pairwise import distance_blocks, pairwise_distances
    from luminosity.drift.pca import PCA, PCASums
    from luminosity.drift.report.write import write_report
    from luminosity.drift.result import KernelResult, MMDTestResult
    from luminosity.drift.rff import RFFSums, rff_mmd
    from luminosity.drift.transforms.mmd_transforms import MMD, MMDTest
    from luminosity.drift.transforms.pca_transforms import ApplyPCA, FitPCA
    from luminosity.drift.witness_function import witness

__all__ = [
    "MMD",
    "PCA",
    "RBF",
    "Aggregate",
    "ApplyPCA",
    "AutocorrelationWarning",
    "BlockKernel",
    "DetectDrift",
    "DriftAlert",
    "DriftHistory",
    "FitPCA",
    "Kernel",
    "KernelResult",
    "Laplacian",
    "Linear",
    "MMDTest",
    "MMDTestResult",
    "OnlineDetector",
    "OnlineMMD",
    "PCASums",
    "PastTest",
    "Polynomial",
    "RFFSums",
    "RowKernel",
    "distance_blocks",
    "mmd2",
    "mmd_test",
    "pairwise_distances",
    "rff_mmd",
    "witness",
    "write_report",
]

_HOMES = {
    "Aggregate": "aggregate",
    **dict.fromkeys(["DriftHistory", "PastTest"], "history"),
    **dict.fromkeys(["BlockKernel", "Kernel", "Laplacian", "Linear", "Polynomial", "RBF", "RowKernel"], "kernels"),
    **dict.fromkeys(["mmd2", "mmd_test"], "mmd"),
    "AutocorrelationWarning": "online.autocorrelation",
    **dict.fromkeys(["OnlineDetector", "OnlineMMD"], "online.detector"),
    "DriftAlert": "online.streams",
    "DetectDrift": "online.detect_drift",
    **dict.fromkeys(["distance_blocks", "pairwise_distances"], "pairwise"),
    **dict.fromkeys(["PCA", "PCASums"], "pca"),
    "write_report": "report.write",
    **dict.fromkeys(["KernelResult", "MMDTestResult"], "result"),
    **dict.fromkeys(["RFFSums", "rff_mmd"], "rff"),
    **dict.fromkeys(["ApplyPCA", "FitPCA"], "transforms.pca_transforms"),
    **dict.fromkeys(["MMD", "MMDTest"], "transforms.mmd_transforms"),
    "witness": "witness_function",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
