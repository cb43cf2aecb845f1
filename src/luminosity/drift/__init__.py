"""Tests whether two sets of embeddings come from the same distribution: arrays, pipelines or streams.

Every name is imported when it is first used, because JAX takes long to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from luminosity._shared.lazy import lazy_names

if TYPE_CHECKING:
    from luminosity.drift.by_key import KeyedComparison, compare_keys
    from luminosity.drift.column_drift import column_test
    from luminosity.drift.column_result import ColumnResult, ColumnTestResult
    from luminosity.drift.compare import SampleComparison, compare_samples
    from luminosity.drift.contract import Comparison, DriftOption, DriftTest
    from luminosity.drift.distances import distance_blocks, pairwise_distances
    from luminosity.drift.history import DriftHistory
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
    from luminosity.drift.result import DriftResult, PastTest
    from luminosity.drift.samples import (
        ColumnScale,
        PreparedSamples,
        RowSampler,
        SampledRows,
        fit_components,
        prepare_samples,
        sample_rows,
    )
    from luminosity.drift.transforms.column_transforms import ColumnTest
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
    "DriftOption",
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

if not TYPE_CHECKING:  # so that a type checker reports names that don't exist
    __getattr__, __dir__ = lazy_names(__name__)
