"""Tests whether two sets of embeddings come from the same distribution: arrays, pipelines or streams.

Every name is imported when it is first used, because JAX takes long to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luminosity.drift.aggregate import Aggregate
    from luminosity.drift.by_key import KeyedComparison, compare_keys
    from luminosity.drift.columns import ColumnResult, ColumnTest, ColumnTestResult, column_test
    from luminosity.drift.compare import SampleComparison, compare_samples
    from luminosity.drift.contract import Comparison, DriftTest
    from luminosity.drift.history import DriftHistory, PastTest
    from luminosity.drift.kernels import RBF, BlockKernel, Kernel, Laplacian, Linear, Polynomial, RowKernel
    from luminosity.drift.mmd import mmd2, mmd_test
    from luminosity.drift.mmd_result import KernelResult, MMDTestResult
    from luminosity.drift.online.detect_drift import DetectDrift
    from luminosity.drift.online.detector import OnlineDetector, OnlineMMD
    from luminosity.drift.online.streams import DriftAlert
    from luminosity.drift.online.windowed_statistic import AutocorrelationWarning
    from luminosity.drift.pairwise import distance_blocks, pairwise_distances
    from luminosity.drift.pca import PCA, PCASums
    from luminosity.drift.report.write import write_report
    from luminosity.drift.result import DriftResult
    from luminosity.drift.rff import RFFSums, rff_mmd
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
    from luminosity.drift.witness_function import Extremes, find_extremes, witness

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
    "aggregate": ["Aggregate"],
    "by_key": ["KeyedComparison", "compare_keys"],
    "columns": ["ColumnResult", "ColumnTest", "ColumnTestResult", "column_test"],
    "compare": ["SampleComparison", "compare_samples"],
    "contract": ["Comparison", "DriftTest"],
    "history": ["DriftHistory", "PastTest"],
    "kernels": ["RBF", "BlockKernel", "Kernel", "Laplacian", "Linear", "Polynomial", "RowKernel"],
    "mmd": ["mmd2", "mmd_test"],
    "online.windowed_statistic": ["AutocorrelationWarning"],
    "online.detect_drift": ["DetectDrift"],
    "online.detector": ["OnlineDetector", "OnlineMMD"],
    "online.streams": ["DriftAlert"],
    "pairwise": ["distance_blocks", "pairwise_distances"],
    "pca": ["PCA", "PCASums"],
    "report.write": ["write_report"],
    "mmd_result": ["KernelResult", "MMDTestResult"],
    "result": ["DriftResult"],
    "rff": ["RFFSums", "rff_mmd"],
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
    "witness_function": ["Extremes", "find_extremes", "witness"],
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
