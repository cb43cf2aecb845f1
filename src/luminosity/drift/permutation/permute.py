"""MMD² from sums over pairs of bins, its distribution under the null hypothesis, and its standard error.

Several kernels become one test that keeps its level: ``fused`` divides each estimate by the standard deviation of its
null and takes the largest. The data's own order is treated as one permutation among the others, so that its rank is
uniform under the null hypothesis: looking at many kernels costs nothing but a little power.

With ten bandwidths this detects a shift of the mean about as often as the median bandwidth (75% of the time against
78%), a change of correlation 98% against 58%, and few outliers 88% against 64% (benchmarks/drift_power.py). In a first
comparison softer maxima detected less, and units taken from the kernel's values, as in MMD-FUSE (Biggs, Schrab and
Gretton 2023, arXiv 2306.08777), detected hardly any outliers. The smallest of the kernels' p-values as the statistic
came out about the same.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from luminosity.drift.sums.bins import BinCounts

__all__ = ["estimates", "fused", "jackknife", "null_estimates", "observed_side"]

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
