"""The distance of each row to each other, a tile at a time: each is computed where it belongs, in the caches.

Plain BLAS: here XLA's matrix product is no quicker, and its results would have to be copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from luminosity.drift.block_sums import double_precision
from luminosity.drift.distances import manhattan
from luminosity.drift.rows import Precision, Rows, as_rows, check_precision
from luminosity.errors import DriftError

__all__ = ["Metric", "distance_blocks", "pairwise_distances"]

Metric: TypeAlias = Literal["euclidean", "sqeuclidean", "manhattan", "cosine"]

_TILE = 512  # rows: a tile of single precision is 1 MB, which the cache of a core holds
_MOST_THREADS = 4
_NEAR = {"float32": 1e-3, "float64": 1e-12}  # of the squared norms: nearer than that, too many digits have cancelled
_EQUAL = 1e-14  # of the squared norms: nearer than that, double precision has none left


def pairwise_distances(
    x: Any, y: Any = None, metric: Metric = "euclidean", *, precision: Precision = "float32", out: Any = None
) -> Any:
    """The distance of each row of ``x`` to each row of ``y``, or of ``x`` itself.

    Near rows are looked at again in double precision, and equal ones are at zero. The result takes 4 bytes for each
    pair: where that is too much, take ``distance_blocks``, or let ``out`` be a ``numpy.memmap``.

    >>> pairwise_distances([[0.0, 0.0], [3.0, 4.0]])
    array([[0., 5.],
           [5., 0.]], dtype=float32)
    """
    distances = _Distances(x, y, metric, precision)
    if out is None:
        out = np.empty(distances.shape, dtype=precision)
    elif out.shape != distances.shape or out.dtype != np.dtype(precision):
        raise DriftError(f"out is {out.dtype} {out.shape}, expected {precision} {distances.shape}.")

    def fill(tile: tuple[slice, slice]) -> None:
        rows, others = tile
        distances.fill(rows, others, out[rows, others])
        if distances.symmetric and rows != others:
            out[others, rows] = out[rows, others].T

    with _threads() as threads:
        for rows in _parts(distances.shape[0]):
            columns = _parts(distances.shape[1], rows.start if distances.symmetric else 0)
            for _ in threads.map(fill, [(rows, others) for others in columns]):
                pass
    return out


def distance_blocks(
    x: Any, y: Any = None, metric: Metric = "euclidean", *, precision: Precision = "float32"
) -> Iterator[tuple[slice, Any]]:
    """The same for some rows of ``x`` at a time: which ones, and their distances to all rows of ``y``.

    The ten nearest of each row, say, never need the whole matrix:

    >>> rows = np.random.default_rng(0).normal(size=(3000, 8))
    >>> nearest = np.empty((3000, 10), dtype=int)
    >>> for part, distances in distance_blocks(rows):
    ...     nearest[part] = np.argpartition(distances, 10)[:, :10]
    """
    distances = _Distances(x, y, metric, precision)
    with _threads() as threads:
        for rows in _parts(distances.shape[0]):
            block = np.empty((rows.stop - rows.start, distances.shape[1]), dtype=precision)

            def fill(others: slice, rows: slice = rows, block: Any = block) -> None:
                distances.fill(rows, others, block[:, others])

            for _ in threads.map(fill, _parts(distances.shape[1])):
                pass
            yield rows, block


class _Distances:
    """Both sides, ready to compute with: seen from the middle of all, which keeps digits, and rounded once."""

    def __init__(self, x: Any, y: Any, metric: Metric, precision: Precision) -> None:
        check_precision(precision)
        if metric not in get_args(Metric):
            raise DriftError(f"Found metric={metric!r}, expected one of {', '.join(get_args(Metric))}.")
        x = as_rows(x, "x", least=1)
        y = x if y is None else as_rows(y, "y", least=1)
        if x.shape[1] != y.shape[1]:
            raise DriftError(f"x has rows of {x.shape[1]} numbers, y of {y.shape[1]}. Expected one width.")
        if metric == "cosine":
            x, y = _directions(x, "x"), (_directions(y, "y") if y is not x else None)
        self.symmetric = y is None or y is x
        self.metric, self.precision = metric, precision
        centre = (x.mean(axis=0, dtype=np.float64) + (x if y is None else y).mean(axis=0, dtype=np.float64)) / 2
        self.x = (x - centre).astype(precision, copy=False)
        self.y = self.x if self.symmetric else (y - centre).astype(precision, copy=False)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.x), len(self.y)

    def fill(self, rows: slice, others: slice, out: Any) -> None:
        x, y = self.x[rows], self.y[others]
        if self.metric == "manhattan":
            with double_precision(self.precision):
                out[:] = _manhattan()(x, y)
            return
        _squared(x, y, out)
        if out.min() <= _NEAR[self.precision] * (_norms(x).max() + _norms(y).max()):
            out[:] = _squared_exactly(x, y)
        if self.metric == "euclidean":
            np.sqrt(out, out=out)
        elif self.metric == "cosine":  # Of rows of length one: 1 - x · y = |x - y|² / 2.
            out *= 0.5


def _squared(x: Rows, y: Rows, out: Any) -> None:
    """``|x - y|²`` for each pair, all of it in one matrix product: the norms are two more columns."""
    one = np.ones((max(len(x), len(y)), 1), dtype=x.dtype)
    left = np.concatenate([-2 * x, _norms(x), one[: len(x)]], axis=1)
    right = np.concatenate([y, one[: len(y)], _norms(y)], axis=1)
    np.matmul(left, right.T, out=out)


def _squared_exactly(x: Rows, y: Rows) -> Any:
    """Where rows are near, it is a small difference of large numbers; double precision has digits to spare."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    squared = np.empty((len(x), len(y)))
    _squared(x, y, squared)
    squared[squared < _EQUAL * (_norms(x) + _norms(y).T)] = 0
    return squared


def _norms(rows: Rows) -> Any:
    return np.einsum("ij,ij->i", rows, rows)[:, None]


def _directions(rows: Rows, name: str) -> Rows:
    """Rows of length one; made of moderate numbers first, whose squares are in range."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    if not largest.all():
        without = largest[:, 0] == 0
        raise DriftError(
            f"{name} has {int(without.sum()):,} rows of zeros alone, the first at {int(without.argmax())}: "
            "they point nowhere, so that no cosine is theirs. Leave them out, or take another metric."
        )
    moderate = rows / largest
    return moderate / np.sqrt(_norms(moderate))


@cache
def _manhattan() -> Any:
    import jax

    return jax.jit(manhattan)


def _parts(count: int, start: int = 0) -> list[slice]:
    return [slice(at, min(at + _TILE, count)) for at in range(start, count, _TILE)]


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
