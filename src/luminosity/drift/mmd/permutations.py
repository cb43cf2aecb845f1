"""From sums over pairs of bins to the result of a test: MMD², its null distribution and its standard error.

Several kernels become one test that keeps its level: ``fused`` divides each estimate by the standard deviation of its
null and takes the largest. The data's own order is treated as one permutation among the others, so that its rank is
uniform under the null hypothesis: looking at many kernels costs nothing but a little power.

With ten bandwidths this detects a shift of the mean about as often as the median bandwidth (75% of the time against
78%), a change of correlation 98% against 58%, and few outliers 88% against 64% (benchmarks/drift_power.py). Softer
maxima, and units taken from the kernel's values as in MMD-FUSE (Biggs, Schrab and Gretton 2023, arXiv 2306.08777),
detected less; the smallest of the kernels' p-values as the statistic came out about the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.drift.kernels import Kernel
from luminosity.drift.mmd.mmd_result import QUANTILES, Histogram, KernelResult, MMDTestResult
from luminosity.drift.rows import check_precision, check_seed, is_whole
from luminosity.drift.sums.bins import BinCounts
from luminosity.errors import DriftError

__all__ = ["Settings", "conclude", "estimates", "fused", "null_estimates", "observed_side", "p_value"]

_AT_ONCE = 1 << 21  # numbers in a chunk of permutations: 16 MB, and about four times that in total


def observed_side(bins: BinCounts) -> Any:
    """Return 1 for bins of the reference, 0 for the others."""
    return np.repeat([1.0, 0.0], [bins.reference, bins.current])


def estimates(sums: Any, counts: Any, sides: Any) -> Any:
    """Return the unbiased MMD² for each row of ``sides``, which assigns each bin to the reference (1) or not (0).

    ``sums`` holds k(x, y) summed over all ordered pairs of different rows, by the bins of x and y; ``counts`` holds the
    rows of each bin.
    """
    x_rows = sides @ counts
    y_rows = counts.sum() - x_rows
    xx = np.einsum("ij,ij->i", sides @ sums, sides)
    x_all = sides @ sums.sum(axis=1)
    yy = sums.sum() - 2 * x_all + xx
    return _mean(xx, x_rows, x_rows - 1) + _mean(yy, y_rows, y_rows - 1) - 2 * _mean(x_all - xx, x_rows, y_rows)


def _mean(sums: Any, rows: Any, others: Any) -> Any:
    """Return means; zero if there are no pairs, which happens with hashed bins of few rows."""
    return sums / np.maximum(rows * others, 1)


def null_estimates(sums: Any, counts: Any, bins: BinCounts, permutations: int, seed: int) -> Any:
    """Return MMD² of each kernel (first axis) for random assignments of the bins to the samples.

    If there are no more assignments than ``permutations``, each of them is there once, except for the observed one.
    Then the p-value is exact.
    """
    if math.comb(bins.all, bins.reference) - 1 <= permutations:
        sides = _all_assignments(bins)
        sides[~_can_be_estimated(sides, counts)] = observed_side(bins)
        return np.stack([estimates(each, counts, sides) for each in sums])
    random = np.random.default_rng((seed, 2))
    chunk = max(1, _AT_ONCE // bins.all)
    parts: list[Any] = []
    for start in range(0, permutations, chunk):
        keys = random.random((min(chunk, permutations - start), bins.all))
        last = np.partition(keys, bins.reference - 1, axis=1)[:, bins.reference - 1]
        sides = (keys <= last[:, None]).astype(np.float64)
        sides[~_can_be_estimated(sides, counts)] = observed_side(bins)
        parts.append(np.stack([estimates(each, counts, sides) for each in sums]))
    return np.concatenate(parts, axis=1)


def _all_assignments(bins: BinCounts) -> Any:
    """Return every assignment of the bins but the observed one, which comes first in this order."""
    chosen = list(itertools.combinations(range(bins.all), bins.reference))[1:]
    sides = np.zeros((len(chosen), bins.all))
    np.put_along_axis(sides, np.array(chosen, dtype=np.int64).reshape(len(chosen), bins.reference), 1.0, axis=1)
    return sides


def _can_be_estimated(sides: Any, counts: Any) -> Any:
    """Return whether both sides have at least two rows. Few rows in few hashed bins may leave a side with less.

    Such an assignment is replaced by the observed one, which can only raise the p-value.
    """
    rows = sides @ counts
    return np.minimum(rows, counts.sum() - rows) >= 2


def jackknife(sums: Any, counts: Any, bins: BinCounts) -> float:
    """Return the standard error of MMD², from leaving out each bin in turn. The two samples are independent.

    The result is NaN with fewer than three bins, or if fewer than two rows would be left.
    """
    x = observed_side(bins) == 1
    left = min((counts[each].sum() - counts[each]).min() for each in (x, ~x))
    if min(bins.reference, bins.current) < 3 or left < 2:
        return float("nan")
    return float((_spread(sums, counts, x) + _spread(sums, counts, ~x)) ** 0.5)


def _spread(sums: Any, counts: Any, x: Any) -> float:
    """Return the jackknife's variance from one sample, whose bins the mask ``x`` marks."""
    own, across = sums[x][:, x], sums[x][:, ~x].sum(axis=1)
    x_rows, y_rows = counts[x].sum() - counts[x], counts[~x].sum()
    xx = own.sum() - 2 * own.sum(axis=1) + own.diagonal()
    xy = across.sum() - across
    yy = sums[~x][:, ~x].sum()
    left_out = xx / (x_rows * (x_rows - 1)) + yy / (y_rows * (y_rows - 1)) - 2 * xy / (x_rows * y_rows)
    return (len(own) - 1) / len(own) * float(((left_out - left_out.mean()) ** 2).sum())


def fused(observed: Any, null: Any, rounding: Any = 0.0) -> tuple[float, Any]:
    """Return one statistic of the data and of each permutation, from those of each kernel (first axis).

    A kernel that varies by no more than ``rounding`` (one number, or one for each kernel) is left out.
    """
    every = np.concatenate([observed[:, None], null], axis=1)
    units = every.std(axis=1, keepdims=True)
    varies = units > np.broadcast_to(rounding, len(every))[:, None]
    standard = np.where(varies, every - every.mean(axis=1, keepdims=True), 0)
    largest = (standard / np.where(varies, units, 1)).max(axis=0)
    return float(largest[0]), largest[1:]


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
