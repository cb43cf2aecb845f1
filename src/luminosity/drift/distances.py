"""Distances of rows, in forms that run at the speed of a matrix product."""

from __future__ import annotations

from typing import Any

import numpy as np

from luminosity.errors import DriftError

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


SAMPLE_ROWS = 1000  # rows whose distances are looked at: half a million pairs, the median is good to a percent


def minus_half_squared(x: Any, y: Any) -> Any:
    """``-|x - y|² / 2`` for each pair, all of it in one matrix product: the norms are two more columns."""
    import jax.numpy as jnp

    def norms(rows: Any) -> Any:
        return -0.5 * jnp.sum(rows * rows, axis=1, keepdims=True)

    left = jnp.concatenate([x, norms(x), jnp.ones((x.shape[0], 1), x.dtype)], axis=1)
    right = jnp.concatenate([y, jnp.ones((y.shape[0], 1), y.dtype), norms(y)], axis=1)
    return jnp.matmul(left, right.T, precision="highest")


def near_middle(rows: Any) -> Any:
    """In each column the middle one of five rows: quickly found, and an outlier does not move it far.

    Three of them are the first ones: blocks are filled up with copies of their last row, which may be the outlier.
    """
    import jax.numpy as jnp

    count = len(rows)
    return jnp.sort(jnp.stack([rows[at] for at in (0, 1 % count, 2 % count, count // 2, -1)]), axis=0)[2]


def manhattan(x: Any, y: Any) -> Any:
    """Sums of absolute differences, column by column: nothing larger than the result is ever held."""
    import jax
    import jax.numpy as jnp

    def add(total: Any, columns: tuple[Any, Any]) -> tuple[Any, None]:
        return total + jnp.abs(columns[0][:, None] - columns[1][None, :]), None

    return jax.lax.scan(add, jnp.zeros((x.shape[0], y.shape[0]), x.dtype), (x.T, y.T))[0]


def euclidean_pairs(sample: Any) -> Any:
    """The distance of each pair of rows, once."""
    sample = np.asarray(sample, dtype=np.float64)
    sample = sample - np.median(sample, axis=0)
    norms = (sample * sample).sum(axis=1)
    sums = norms[:, None] + norms[None, :]
    squared = sums - 2 * sample @ sample.T
    squared[squared < 1e-12 * sums] = 0  # Rounding makes equal rows differ.
    return np.sqrt(squared[_pairs(sample)])


def manhattan_pairs(sample: Any) -> Any:
    sample = np.asarray(sample, dtype=np.float64)
    total = np.zeros((len(sample), len(sample)))
    for column in sample.T:
        total += np.abs(column[:, None] - column[None, :])
    return total[_pairs(sample)]


def _pairs(sample: Any) -> Any:
    return np.triu_indices(len(sample), 1)


def median_of(distances: Any) -> float:
    """
    >>> median_of([0.0, 0.0, 0.0, 1.0, 2.0, 4.0])
    2.0
    """
    return float(np.median(_above_zero(distances)))


def range_of(distances: Any, count: int) -> list[float]:
    """So many bandwidths, each larger than the one before by the same factor, from half the smallest distances (but
    for a twentieth of them) to twice the largest.
    """
    low, high = np.quantile(_above_zero(distances), [0.05, 0.95])
    return [float(each) for each in np.geomspace(low / 2, 2 * high, count)]


def _above_zero(distances: Any) -> Any:
    """Many equal rows must not make the typical distance zero."""
    distances = np.asarray(distances)
    apart = distances[distances > 0]
    if len(apart) == 0:
        raise DriftError(
            "All rows looked at are equal, so that no distance is typical. Give the kernel a bandwidth; "
            "or perhaps the column is constant."
        )
    return apart
