"""From sums over pairs of bins: MMD², its distribution under the null hypothesis, and how sure the estimate is."""

from __future__ import annotations

from typing import Any

import numpy as np

from luminosity.drift.sums.bins import BinCounts

__all__ = ["estimates", "fused", "jackknife", "null_estimates", "observed_side"]


_AT_ONCE = 1 << 21  # numbers in a chunk of permutations: 16 MB, and some four times that in all


def observed_side(bins: BinCounts) -> Any:
    """1 for bins of the reference, 0 for the others."""
    return np.repeat([1.0, 0.0], [bins.reference, bins.current])


def estimates(sums: Any, counts: Any, sides: Any) -> Any:
    """The unbiased MMD² for each row of ``sides``, which says with 1 and 0 where each bin belongs.

    ``sums`` holds k(x, y) over all ordered pairs of different rows, by the bins of x and y; ``counts`` the bins' rows.
    """
    x_rows = sides @ counts
    y_rows = counts.sum() - x_rows
    xx = np.einsum("ij,ij->i", sides @ sums, sides)
    x_all = sides @ sums.sum(axis=1)
    yy = sums.sum() - 2 * x_all + xx
    return _mean(xx, x_rows, x_rows - 1) + _mean(yy, y_rows, y_rows - 1) - 2 * _mean(x_all - xx, x_rows, y_rows)


def _mean(sums: Any, rows: Any, others: Any) -> Any:
    """Zero where there are no pairs, as may happen with hashed bins of few rows: that is what others are around."""
    return sums / np.maximum(rows * others, 1)


def null_estimates(sums: Any, counts: Any, bins: BinCounts, permutations: int, seed: int) -> Any:
    """MMD² of each kernel (first axis) for so many random ways to part the bins as they are parted."""
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


def _can_be_estimated(sides: Any, counts: Any) -> Any:
    """Not where a side has less than two rows, as happens when few rows fall into few bins by their hashes.

    Such a parting is taken for the observed one, which can only raise the p-value.
    """
    rows = sides @ counts
    return np.minimum(rows, counts.sum() - rows) >= 2


def jackknife(sums: Any, counts: Any, bins: BinCounts) -> float:
    """The standard error of MMD², from leaving out each bin in turn; the two samples are independent.

    Not a number where there is none: with less than three bins, or less than two rows left.
    """
    x = observed_side(bins) == 1
    left = min((counts[each].sum() - counts[each]).min() for each in (x, ~x))
    if min(bins.reference, bins.current) < 3 or left < 2:
        return float("nan")
    return float((_spread(sums, counts, x) + _spread(sums, counts, ~x)) ** 0.5)


def _spread(sums: Any, counts: Any, x: Any) -> float:
    """The jackknife's variance from one sample: ``x`` says which bins are its own."""
    own, across = sums[x][:, x], sums[x][:, ~x].sum(axis=1)
    x_rows, y_rows = counts[x].sum() - counts[x], counts[~x].sum()
    xx = own.sum() - 2 * own.sum(axis=1) + own.diagonal()
    xy = across.sum() - across
    yy = sums[~x][:, ~x].sum()
    left_out = xx / (x_rows * (x_rows - 1)) + yy / (y_rows * (y_rows - 1)) - 2 * xy / (x_rows * y_rows)
    return (len(own) - 1) / len(own) * float(((left_out - left_out.mean()) ** 2).sum())


def fused(observed: Any, null: Any, rounding: Any = 0.0) -> tuple[float, Any]:
    """The statistic of the data and of each permutation, from those of each kernel (first axis).

    A kernel that varies by no more than ``rounding`` (one number, or one for each) has nothing to say.
    """
    every = np.concatenate([observed[:, None], null], axis=1)
    units = every.std(axis=1, keepdims=True)
    says_something = units > np.broadcast_to(rounding, len(every))[:, None]
    standard = np.where(says_something, every - every.mean(axis=1, keepdims=True), 0)
    largest = (standard / np.where(says_something, units, 1)).max(axis=0)
    return float(largest[0]), largest[1:]
