"""Distances of rows, computed as matrix products, and the bandwidths that are chosen from them.

A bandwidth is chosen from the distances of the rows of both samples together. Chosen from one sample alone it would
tell the samples apart, and the test would report drift too often.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from luminosity.errors import DriftError, Fix

__all__ = [
    "SAMPLE_ROWS",
    "euclidean_pairs",
    "manhattan",
    "manhattan_pairs",
    "median_of",
    "minus_half_squared",
    "near_middle",
    "range_of",
]

SAMPLE_ROWS = 1000  # rows that a bandwidth is chosen from: half a million pairs give the median to a percent


def minus_half_squared(x: Any, y: Any) -> Any:
    """Return ``-|x - y|² / 2`` for each pair of rows, from one matrix product: the norms are two more columns."""
    import jax.numpy as jnp

    def norms(rows: Any) -> Any:
        return -0.5 * jnp.sum(rows * rows, axis=1, keepdims=True)

    left = jnp.concatenate([x, norms(x), jnp.ones((x.shape[0], 1), x.dtype)], axis=1)
    right = jnp.concatenate([y, jnp.ones((y.shape[0], 1), y.dtype), norms(y)], axis=1)
    return jnp.matmul(left, right.T, precision="highest")


def near_middle(rows: Any) -> Any:
    """Return the median of five rows in each column: quickly found, and an outlier does not move it far.

    Three of the five are the first rows: strips are filled up with copies of their last row, which may be an outlier.
    """
    import jax.numpy as jnp

    count = len(rows)
    return jnp.sort(jnp.stack([rows[at] for at in (0, 1 % count, 2 % count, count // 2, -1)]), axis=0)[2]


def manhattan(x: Any, y: Any) -> Any:
    """Return the sum of absolute differences for each pair, adding up columns so that memory holds only the result."""
    import jax
    import jax.numpy as jnp

    def add(total: Any, columns: tuple[Any, Any]) -> tuple[Any, None]:
        return total + jnp.abs(columns[0][:, None] - columns[1][None, :]), None

    return jax.lax.scan(add, jnp.zeros((x.shape[0], y.shape[0]), x.dtype), (x.T, y.T))[0]


def euclidean_pairs(sample: Any) -> Any:
    """Return the Euclidean distance of each pair of rows, each pair once."""
    sample = np.asarray(sample, dtype=np.float64)
    sample = sample - np.median(sample, axis=0)
    norms = (sample * sample).sum(axis=1)
    sums = norms[:, None] + norms[None, :]
    squared = sums - 2 * sample @ sample.T
    squared[squared < 1e-12 * sums] = 0  # Rounding makes equal rows differ.
    return np.sqrt(squared[_pairs(sample)])


def manhattan_pairs(sample: Any) -> Any:
    """Return the sum of absolute differences of each pair of rows, each pair once."""
    sample = np.asarray(sample, dtype=np.float64)
    total = np.zeros((len(sample), len(sample)))
    for column in sample.T:
        total += np.abs(column[:, None] - column[None, :])
    return total[_pairs(sample)]


def _pairs(sample: Any) -> Any:
    return np.triu_indices(len(sample), 1)


def median_of(distances: Any) -> float:
    """Return the median of the distances above zero.

    >>> median_of([0.0, 0.0, 0.0, 1.0, 2.0, 4.0])
    2.0
    """
    return float(np.median(_above_zero(distances)))


def range_of(distances: Any, count: int) -> list[float]:
    """Return ``count`` bandwidths in a geometric sequence, from half the 5% quantile of distances to twice the 95%."""
    low, high = np.quantile(_above_zero(distances), [0.05, 0.95])
    return [float(each) for each in np.geomspace(low / 2, 2 * high, count)]


def _above_zero(distances: Any) -> Any:
    """Leave out distances of equal rows: with many of them, the typical distance would be zero."""
    distances = np.asarray(distances)
    apart = distances[distances > 0]
    if len(apart) == 0:
        raise DriftError(
            "the sampled rows are all equal, expected some that differ: no bandwidth can be chosen; perhaps the column "
            "is constant",
            fix=Fix("pass the kernel a bandwidth", command="add --bandwidth"),
        )
    return apart
