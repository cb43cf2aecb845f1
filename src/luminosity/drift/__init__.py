"""Tests whether two sets of embeddings come from the same distribution: arrays, pipelines or streams.

Every name is imported when it is first used, because JAX takes long to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luminosity.drift.by_key import KeyedComparison, compare_keys
    from luminosity.drift.columns import ColumnResult, ColumnTest, ColumnTestResult, column_test
    from luminosity.drift.compare import SampleComparison, compare_samples
    from luminosity.drift.contract import Comparison, DriftTest
    from luminosity.drift.distances import distance_blocks, pairwise_distances
    from luminosity.drift.history import DriftHistory, PastTest
    from luminosity.drift.kernels import RBF, Aggregate, BlockKernel, Kernel, Laplacian, Linear, Polynomial, RowKernel
    from luminosity.drift.mmd.exact import mmd2, mmd_test
    from luminosity.drift.mmd.mmd_result import KernelResult, MMDTestResult
    from luminosity.drift.mmd.rff import RFFSums, rff_mmd
    from luminosity.drift.mmd.witness import Extremes, find_extremes, witness
    from luminosity.drift.online.detect_drift import DetectDrift, DriftAlert
    from luminosity.drift.online.detector import OnlineDetector, OnlineMMD
    from luminosity.drift.online.windowed_statistic import AutocorrelationWarning
    from luminosity.drift.pca import PCA, PCASums
    from luminosity.drift.report.write import write_report
    from luminosity.drift.result import DriftResult
    from luminosity.drift.samples import (
        ColumnScale,
        PreparedSamples,
        RowSampler,
        SampledRows,
        fit_components,
        prepare_samples,
        sample_rows,
    )
    from luminosity.drift.transforms.mmd_transforms import MMD, MMDTest
    from luminosity.drift.transforms.pca_transforms import ApplyPCA, FitPCA
    from luminosity.drift.watch.record_drift import RecordDrift

__all__ = [
    "MMD",
    "PCA",
    "RBF",
    "Aggregate",
    "ApplyPCA",
    "AutocorrelationWarning",
    "BlockKernel",
    "ColumnResult",
    "ColumnScale",
    "ColumnTest",
    "ColumnTestResult",
    "Comparison",
    "DetectDrift",
    "DriftAlert",
    "DriftHistory",
    "DriftResult",
    "DriftTest",
    "Extremes",
    "FitPCA",
    "Kernel",
    "KernelResult",
    "KeyedComparison",
    "Laplacian",
    "Linear",
    "MMDTest",
    "MMDTestResult",
    "OnlineDetector",
    "OnlineMMD",
    "PCASums",
    "PastTest",
    "Polynomial",
    "PreparedSamples",
    "RFFSums",
    "RecordDrift",
    "RowKernel",
    "RowSampler",
    "SampleComparison",
    "SampledRows",
    "column_test",
    "compare_keys",
    "compare_samples",
    "distance_blocks",
    "find_extremes",
    "fit_components",
    "mmd2",
    "mmd_test",
    "pairwise_distances",
    "prepare_samples",
    "rff_mmd",
    "sample_rows",
    "witness",
    "write_report",
]

_NAMES_BY_MODULE = {
    "by_key": ["KeyedComparison", "compare_keys"],
    "columns": ["ColumnResult", "ColumnTest", "ColumnTestResult", "column_test"],
    "compare": ["SampleComparison", "compare_samples"],
    "contract": ["Comparison", "DriftTest"],
    "distances": ["distance_blocks", "pairwise_distances"],
    "history": ["DriftHistory", "PastTest"],
    "kernels": ["RBF", "Aggregate", "BlockKernel", "Kernel", "Laplacian", "Linear", "Polynomial", "RowKernel"],
    "mmd.exact": ["mmd2", "mmd_test"],
    "mmd.mmd_result": ["KernelResult", "MMDTestResult"],
    "mmd.rff": ["RFFSums", "rff_mmd"],
    "mmd.witness": ["Extremes", "find_extremes", "witness"],
    "online.detect_drift": ["DetectDrift", "DriftAlert"],
    "online.detector": ["OnlineDetector", "OnlineMMD"],
    "online.windowed_statistic": ["AutocorrelationWarning"],
    "pca": ["PCA", "PCASums"],
    "report.write": ["write_report"],
    "result": ["DriftResult"],
    "samples": [
        "ColumnScale",
        "PreparedSamples",
        "RowSampler",
        "SampledRows",
        "fit_components",
        "prepare_samples",
        "sample_rows",
    ],
    "transforms.mmd_transforms": ["MMD", "MMDTest"],
    "transforms.pca_transforms": ["ApplyPCA", "FitPCA"],
    "watch.record_drift": ["RecordDrift"],
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
