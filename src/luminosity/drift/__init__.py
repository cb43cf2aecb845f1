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
    from luminosity.drift.online.contract import OnlineDetector
    from luminosity.drift.online.detector import OnlineMMD
    from luminosity.drift.online.streams import DriftAlert
    from luminosity.drift.online.transform import DetectDrift
    from luminosity.drift.pairwise import distance_blocks, pairwise_distances
    from luminosity.drift.pca import PCA, PCASums
    from luminosity.drift.report.write import write_report
    from luminosity.drift.result import KernelResult, MMDTestResult
    from luminosity.drift.rff import rff_mmd
    from luminosity.drift.rff_sums import RFFSums
    from luminosity.drift.transforms.apply_pca import ApplyPCA
    from luminosity.drift.transforms.fit_pca import FitPCA
    from luminosity.drift.transforms.mmd import MMD
    from luminosity.drift.transforms.mmd_test import MMDTest
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
    "OnlineDetector": "online.contract",
    "OnlineMMD": "online.detector",
    "DriftAlert": "online.streams",
    "DetectDrift": "online.transform",
    **dict.fromkeys(["distance_blocks", "pairwise_distances"], "pairwise"),
    **dict.fromkeys(["PCA", "PCASums"], "pca"),
    "write_report": "report.write",
    **dict.fromkeys(["KernelResult", "MMDTestResult"], "result"),
    "RFFSums": "rff_sums",
    "rff_mmd": "rff",
    "ApplyPCA": "transforms.apply_pca",
    "FitPCA": "transforms.fit_pca",
    "MMD": "transforms.mmd",
    "MMDTest": "transforms.mmd_test",
    "witness": "witness_function",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
