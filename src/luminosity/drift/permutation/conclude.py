"""Computes the result of a test from the sums over pairs of bins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.drift.kernels import Kernel
from luminosity.drift.mmd_result import QUANTILES, Histogram, KernelResult, MMDTestResult
from luminosity.drift.permutation.permute import estimates, fused, jackknife, null_estimates, observed_side
from luminosity.drift.rows import check_precision, check_seed, is_whole
from luminosity.drift.sums.bins import BinCounts
from luminosity.errors import DriftError

__all__ = ["Settings", "conclude", "p_value"]

_NORMAL_97_5 = 1.959964  # the 97.5% quantile of the normal distribution, for 95% intervals
_ROUNDING = 1e-9  # of a kernel's mean value: far below the spread of the null, even with a million rows
_ROUNDING_OF_FEW = 100  # times the precision of single kernel values, which few rows do not average out
_HISTOGRAM_BARS = 60  # bars of the null's histogram: each is some pixels wide in a report


@dataclass(frozen=True)
class Settings:
    """The settings of a test, checked when they are created."""

    permutations: int = 1000
    level: float = 0.05
    seed: int = 0
    precision: str = "float32"

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise DriftError(f"found level={self.level}, expected a number between 0 and 1, such as 0.05")
        if not is_whole(self.permutations):
            raise DriftError(f"found permutations={self.permutations!r}, expected a whole number")
        if self.permutations < 1 / self.level - 1:
            raise DriftError(
                f"found permutations={self.permutations}, expected at least {int(np.ceil(1 / self.level - 1))}: "
                f"with fewer no p-value can be as low as {self.level}"
            )
        check_seed(self.seed)
        check_precision(self.precision)


def conclude(sums: Any, counts: Any, bins: BinCounts, kernels: Sequence[Kernel], settings: Settings) -> MMDTestResult:
    """Return the result of a test.

    ``sums`` has a matrix for each kernel; ``counts`` holds the rows of each bin, the reference's bins first.
    """
    counts = np.asarray(counts, dtype=np.float64)
    side = observed_side(bins)
    observed = np.array([estimates(each, counts, side[None, :])[0] for each in sums])
    null = null_estimates(sums, counts, bins, settings.permutations, settings.seed)
    rows = float(counts.sum())
    relative = max(_ROUNDING, _ROUNDING_OF_FEW * float(np.finfo(settings.precision).eps) / rows)
    rounding = [relative * float(np.abs(matrix).sum()) / (rows * (rows - 1)) for matrix in sums]
    quantile = _student_97_5(min(bins.reference, bins.current) - 1)
    each = [
        _kernel_result(kernel, float(value), of_null, slack, quantile * jackknife(matrix, counts, bins))
        for kernel, value, of_null, slack, matrix in zip(kernels, observed, null, rounding, sums, strict=True)
    ]
    if len(each) == 1:
        statistic, of_null, slack = float(observed[0]), null[0], rounding[0]
    else:
        (statistic, of_null), slack = fused(observed, null, rounding), 0.0
    strongest = min(each, key=lambda found: (found.p_value, -found.mmd2 / (found.null_sd or 1)))
    p, tried = p_value(statistic, of_null, slack), len(of_null)
    heights, edges = np.histogram(of_null, bins=_HISTOGRAM_BARS, range=_range(of_null))
    return MMDTestResult(
        mmd2=strongest.mmd2,
        interval=strongest.interval,
        statistic=statistic,
        p_value=p,
        p_value_interval=_around(p, tried) if tried == settings.permutations else (p, p),
        level=settings.level,
        null_sd=float(of_null.std()),
        null_quantiles=dict(zip(QUANTILES, map(float, np.quantile(of_null, QUANTILES)), strict=True)),
        null_histogram=Histogram(tuple(map(float, edges)), tuple(map(int, heights))),
        kernels=tuple(each),
        reference_rows=int(counts[: bins.reference].sum()),
        current_rows=int(counts[bins.reference :].sum()),
        reference_bins=bins.reference,
        current_bins=bins.current,
        permutations=tried,
        seed=settings.seed,
        precision=settings.precision,
        smallest_p_value=_smallest_p_value(counts, bins, settings.permutations),
    )


def _smallest_p_value(counts: Any, bins: BinCounts, permutations: int) -> float:
    """Return the smallest p-value: that of samples which differ more than under any other division of the rows.

    A permutation that divides the rows as the data does, or swaps the two samples, has the observed statistic. Bins
    without rows, which hashed ids can have, do not tell permutations apart.

    >>> _smallest_p_value([1] * 6, BinCounts(3, 3), 1000), _smallest_p_value([1] * 7, BinCounts(2, 5), 1000)
    (0.1, 0.0476...)
    """
    filled = np.asarray(counts) > 0
    of_reference, of_current = int(filled[: bins.reference].sum()), int(filled[bins.reference :].sum())
    empty = bins.all - of_reference - of_current
    same = sum(math.comb(empty, bins.reference - side) for side in (of_reference, of_current) if bins.reference >= side)
    return max(same / math.comb(bins.all, bins.reference), 1 / (1 + permutations))


def p_value(observed: float, null: Any, rounding: float = 0.0) -> float:
    """Return the share of permutations whose statistic is as large as the observed one.

    The data's own order counts as one of the permutations, so that the p-value is never zero and the level holds.
    Permutations that divide the rows as the data does may come out lower by ``rounding``: they count, too.
    """
    slack = max(rounding, 1e-9 * float(np.abs(null).max(initial=0.0)))
    return float((1 + np.count_nonzero(null >= observed - slack)) / (1 + len(null)))


def _range(numbers: Any) -> tuple[float, float]:
    """Return the range of the numbers, widened if bars would be too narrow for floating-point numbers."""
    low, high = float(numbers.min()), float(numbers.max())
    if low == high == 0:
        return -0.5, 0.5
    wider = max(0.0, 1e-9 * max(abs(low), abs(high), 1e-300) - (high - low))
    return low - wider, high + wider


def _kernel_result(kernel: Kernel, value: float, null: Any, rounding: float, half: float) -> KernelResult:
    p = p_value(value, null, rounding)
    return KernelResult(kernel.name, kernel.scale, value, (value - half, value + half), float(null.std()), p)


def _student_97_5(freedom: int) -> float:
    """Return Student's 97.5% quantile: few bins estimate their spread badly, so that intervals must be wider."""
    from scipy.special import stdtrit

    return float(stdtrit(max(freedom, 1), 0.975))


def _around(p: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95% interval for the p-value of all permutations, from ``count`` drawn ones."""
    share, z = (p * (count + 1) - 1) / count, _NORMAL_97_5**2 / count
    middle, half = (share + z / 2) / (1 + z), (share * (1 - share) * z + z * z / 4) ** 0.5 / (1 + z)
    return max(0.0, middle - half), min(1.0, middle + half)
