"""Distances of rows: the matrix of all pairs, tile by tile, and the bandwidths that are chosen from them.

A bandwidth is chosen from the distances of the rows of both samples together. Chosen from one sample alone it would
tell the samples apart, and the test would report drift too often.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from luminosity.drift.rows import Precision, Rows, as_rows, check_precision, double_precision
from luminosity.errors import DriftError, Fix

__all__ = [
    "SAMPLE_ROWS",
    "Metric",
    "distance_blocks",
    "euclidean_pairs",
    "manhattan",
    "manhattan_pairs",
    "median_of",
    "minus_half_squared",
    "near_middle",
    "pairwise_distances",
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
    return np.sqrt(squared[_each_once(sample)])


def manhattan_pairs(sample: Any) -> Any:
    """Return the sum of absolute differences of each pair of rows, each pair once."""
    sample = np.asarray(sample, dtype=np.float64)
    total = np.zeros((len(sample), len(sample)))
    for column in sample.T:
        total += np.abs(column[:, None] - column[None, :])
    return total[_each_once(sample)]


def _each_once(sample: Any) -> Any:
    """Return a mask of a symmetric matrix that has each pair of rows once."""
    return np.tri(len(sample), k=-1, dtype=bool)


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


Metric: TypeAlias = Literal["euclidean", "sqeuclidean", "manhattan", "cosine"]
_TILE = 512  # rows: a tile of single precision takes 1 MB, which the cache of a core holds
_ACCELERATOR_TILE = 4096  # rows: 64 MB, large enough to be worth a transfer
_SMALLEST_TILE = 64  # rows
_MOST_THREADS = 4  # one tile is copied into the result while the next one is computed
_NEAR = {"float32": 1e-3, "float64": 1e-12}  # of the squared norms: below it, too many digits have cancelled
_EQUAL = 1e-14  # of the squared norms: below it, double precision has no digits left


def pairwise_distances(
    x: Any,
    y: Any = None,
    metric: Metric = "euclidean",
    *,
    precision: Precision = "float32",
    out: Any = None,
    on_device: bool = False,
) -> Any:
    """Return the distance of each row of ``x`` to each row of ``y``; without ``y``, to each row of ``x``.

    Distances of near rows are computed again in double precision, and those of equal rows are zero. The result takes
    4 bytes per pair. If that is too much, use ``distance_blocks``, or pass a ``numpy.memmap`` as ``out``.

    ``on_device`` leaves the result in the accelerator's memory, as an array of JAX: to copy it to the host takes much
    longer than to compute it. Reduce it there with ``jax.numpy``, then copy only what you need.

    >>> pairwise_distances([[0.0, 0.0], [3.0, 4.0]])
    array([[0., 5.],
           [5., 0.]], dtype=float32)
    >>> float(pairwise_distances([[0.0, 0.0], [3.0, 4.0]], on_device=True).max())
    5.0
    """
    distances = _Distances(x, y, metric, precision)
    if on_device:
        if out is not None:
            raise DriftError("found out with on_device=True, expected one of them")
        return distances.all_on_device()
    if out is None:
        out = np.empty(distances.shape, dtype=precision)
    elif out.shape != distances.shape or out.dtype != np.dtype(precision):
        raise DriftError(f"found out of {out.dtype} {out.shape}, expected {precision} {distances.shape}")

    def fill(tile: tuple[slice, slice]) -> None:
        rows, others = tile
        distances.fill(rows, others, out[rows, others])
        if distances.symmetric and rows != others:
            out[others, rows] = out[rows, others].T

    with _threads() as threads:
        for rows in distances.parts(0):
            columns = [others for others in distances.parts(1) if not distances.symmetric or others.start >= rows.start]
            for _ in threads.map(fill, [(rows, others) for others in columns]):
                pass
    return out


def distance_blocks(
    x: Any, y: Any = None, metric: Metric = "euclidean", *, precision: Precision = "float32"
) -> Iterator[tuple[slice, Any]]:
    """Yield a slice of the rows of ``x`` and their distances to all rows of ``y``, some rows at a time.

    To find the ten nearest of each row, for example, you never need the whole matrix:

    >>> rows = np.random.default_rng(0).normal(size=(3000, 8))
    >>> nearest = np.empty((3000, 10), dtype=int)
    >>> for part, distances in distance_blocks(rows):
    ...     nearest[part] = np.argpartition(distances, 10)[:, :10]
    """
    distances = _Distances(x, y, metric, precision)
    with _threads() as threads:
        for rows in distances.parts(0):
            some = np.empty((rows.stop - rows.start, distances.shape[1]), dtype=precision)

            def fill(others: slice, rows: slice = rows, some: Any = some) -> None:
                distances.fill(rows, others, some[:, others])

            for _ in threads.map(fill, distances.parts(1)):
                pass
            yield rows, some


class _Distances:
    """Both sides, checked, centred to keep digits, rounded to the precision, and cut into tiles."""

    def __init__(self, x: Any, y: Any, metric: Metric, precision: Precision) -> None:
        check_precision(precision)
        if metric not in get_args(Metric):
            raise DriftError(f"found metric={metric!r}, expected one of {', '.join(get_args(Metric))}")
        self.symmetric = y is None
        x = as_rows(x, "x", least=1)
        y = x if self.symmetric else as_rows(y, "y", least=1)
        if x.shape[1] != y.shape[1]:
            raise DriftError(f"x has rows of {x.shape[1]} numbers, y of {y.shape[1]}, expected one width")
        if metric == "cosine":
            x = _directions(x, "x")
            y = x if self.symmetric else _directions(y, "y")
        self.shape = len(x), len(y)
        self._metric, self._precision = metric, precision
        self._tile = _tile_rows(max(self.shape))
        centre = (x.mean(axis=0, dtype=np.float64) + y.mean(axis=0, dtype=np.float64)) / 2
        self._x = self._filled(x - centre)
        self._y = self._x if self.symmetric else self._filled(y - centre)

    def parts(self, axis: int) -> list[slice]:
        count = self.shape[axis]
        return [slice(start, min(start + self._tile, count)) for start in range(0, count, self._tile)]

    def fill(self, rows: slice, others: slice, out: Any) -> None:
        """Write the distances of one tile into ``out``."""
        out[:] = np.asarray(self._computed(rows, others))[: out.shape[0], : out.shape[1]]

    def all_on_device(self) -> Any:
        """Return all distances as an array in the device's memory."""
        tiles: dict[tuple[int, int], Any] = {}
        rows, columns = self.parts(0), self.parts(1)
        for first, some in enumerate(rows):
            for second, others in enumerate(columns):
                is_known = self.symmetric and second < first
                tiles[first, second] = tiles[second, first].T if is_known else self._computed(some, others)
        with double_precision(self._precision):
            return _joined()(
                [[tiles[first, at] for at in range(len(columns))] for first in range(len(rows))], self.shape
            )

    def _computed(self, rows: slice, others: slice) -> Any:
        """Return the distances of one tile on the device.

        The distance of near rows is a small difference of large numbers: a tile with near rows is computed again in
        double precision.
        """
        x, y = self._x[rows.start // self._tile], self._y[others.start // self._tile]
        with double_precision(self._precision):
            found, near = _compiled()(self._metric, _NEAR[self._precision], 0.0, self._precision, x, y)
            near = bool(near)
        if near:
            with double_precision("float64"):
                found, _ = _compiled()(self._metric, 0.0, _EQUAL, self._precision, x, y)
        return found

    def _filled(self, rows: Rows) -> list[Any]:
        """Return the rows in whole tiles, filled up with zeros, so that all tiles share compiled code."""
        import jax

        filled = np.pad(rows.astype(self._precision, copy=False), np.array([(0, -len(rows) % self._tile), (0, 0)]))
        with double_precision(self._precision):
            return [jax.device_put(tile) for tile in filled.reshape(-1, self._tile, rows.shape[1])]


@cache
def _compiled() -> Any:
    import jax
    import jax.numpy as jnp

    def distances(metric: Metric, near: float, equal: float, precision: Precision, x: Any, y: Any) -> tuple[Any, Any]:
        """Return distances, and whether any is below ``near``. Distances below ``equal`` become zero.

        With ``equal``, they are computed in double precision, and rounded on the device: less is copied then.
        """
        x, y = (rows.astype(np.float64) if equal else rows for rows in (x, y))
        if metric == "manhattan":
            return manhattan(x, y), False
        half = -minus_half_squared(x, y)
        x_norms, y_norms = (0.5 * jnp.sum(rows * rows, axis=1) for rows in (x, y))
        if equal:
            half = jnp.where(half < equal * (x_norms[:, None] + y_norms[None, :]), 0, half)
        if metric == "cosine":  # Rows have length one: 1 - x · y = |x - y|² / 2.
            values = half
        else:
            values = jnp.sqrt(2 * jnp.maximum(half, 0)) if metric == "euclidean" else 2 * half
        return values.astype(precision), jnp.min(half) <= near * (jnp.max(x_norms) + jnp.max(y_norms))

    return jax.jit(distances, static_argnums=(0, 1, 2, 3))


@cache
def _joined() -> Any:
    import jax
    import jax.numpy as jnp

    def joined(tiles: Any, shape: tuple[int, int]) -> Any:
        return jnp.block(tiles)[: shape[0], : shape[1]]

    return jax.jit(joined, static_argnums=1)


def _tile_rows(rows: int) -> int:
    import jax

    largest = _TILE if jax.default_backend() == "cpu" else _ACCELERATOR_TILE
    return min(largest, max(_SMALLEST_TILE, 1 << (rows - 1).bit_length()))


def _directions(rows: Rows, name: str) -> Rows:
    """Return rows of length one. They are divided by their largest number first, so that squares stay in range."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    if not largest.all():
        without = largest[:, 0] == 0
        raise DriftError(
            f"{name} has {int(without.sum()):,} rows of only zeros, the first at {int(without.argmax())}, "
            "expected rows with a direction",
            fix="leave these rows out, or pass another metric",
        )
    moderate = rows / largest
    return moderate / np.sqrt(np.einsum("ij,ij->i", moderate, moderate))[:, None]


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
