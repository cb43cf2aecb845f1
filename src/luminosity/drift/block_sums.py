"""Sums of kernel values over pairs of bins, tile by tile: the matrix of all values is never held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from luminosity.drift.kernels import BlockKernel, Kernel
from luminosity.drift.layout import Layout
from luminosity.drift.tiles import tile_sums

__all__ = ["Progress", "block_sums", "double_precision", "sums_of_lists"]

Progress = Callable[[int, int], None]  # tiles done, tiles in all

_TILE = 1024  # rows: a tile of single precision is 4 MB, which the caches of two cores hold
_SMALLEST_TILE = 64
_GROUP = 8
_THREADS = 2  # one tile is reduced to its bins while the next one is computed


def block_sums(
    kernels: Sequence[Kernel],
    offsets: Sequence[float],
    rows: Callable[[Any], Any],
    bins: Any,
    count: int,
    progress: Progress | None = None,
    boundary: int | None = None,
) -> Any:
    """For each kernel a symmetric matrix: its values, less its offset, over ordered pairs of different rows, by bin.

    ``rows`` gives the rows with the given numbers, ready to compute with; ``bins`` the bin of each row, of ``count``.
    With a ``boundary``, only sums over a bin below it and one from it on are whole: not all others are computed.
    """
    tile = _tile_rows(len(bins))
    layout = Layout.of(bins, _GROUP if len(bins) >= 4 * _TILE else 1)
    blocks = _blocks(layout, rows, tile)
    total = np.zeros((len(kernels), count, count))
    in_all, done = len(blocks) * (len(blocks) + 1) // 2, 0
    with double_precision(blocks[0][0].dtype), ThreadPoolExecutor(_THREADS) as threads:

        def compute(first: int, second: int) -> tuple[int, int, Any]:
            (x, wx, x_bins), (y, wy, y_bins) = blocks[first], blocks[second]
            with double_precision(x.dtype):
                sums = tile_sums(kernels, offsets, layout.group, first == second, x, wx, y, wy)
            return first, second, _by_bin(np.asarray(sums, dtype=np.float64), x_bins, y_bins)

        def crosses(first: int, second: int) -> bool:
            return blocks[first][2][0] < boundary <= blocks[second][2][-1]

        for first in range(len(blocks)):
            strip = [other for other in range(first, len(blocks)) if boundary is None or crosses(first, other)]
            for _, second, sums in threads.map(compute, [first] * len(strip), strip):
                _add(total, sums, blocks[first][2], blocks[second][2], first == second)
            done += len(strip)
            if progress is not None:
                progress(done, in_all)
    return total


def sums_of_lists(kernels: Sequence[BlockKernel], things: Sequence[Any], bins: Any, count: int) -> Any:
    """The same for a user's function of two lists, in plain Python."""
    total = np.zeros((len(kernels), count, count))
    starts = range(0, len(things), _TILE)
    for start in starts:
        for other in starts[start // _TILE :]:
            x, y = slice(start, start + _TILE), slice(other, other + _TILE)
            for index, kernel in enumerate(kernels):
                values = kernel.values((), things[x], things[y])
                if start == other:
                    np.fill_diagonal(values, 0)
                np.add.at(total[index], (bins[x][:, None], bins[y][None, :]), values)
                if start != other:
                    np.add.at(total[index], (bins[y][:, None], bins[x][None, :]), values.T)
    return total


def double_precision(dtype: Any) -> Any:
    """JAX computes in single precision unless told otherwise; here for this thread, and for as long as is needed."""
    import jax

    return jax.enable_x64(np.dtype(dtype) == np.float64)


def _tile_rows(rows: int) -> int:
    """A power of two, so that samples of many sizes share compiled code."""
    return min(_TILE, max(_SMALLEST_TILE, 1 << (rows - 1).bit_length()))


def _blocks(layout: Layout, rows: Callable[[Any], Any], tile: int) -> list[tuple[Any, Any, Any]]:
    """Rows, weights and the bins of groups, a tile's worth each; the last is filled up with rows that count nothing."""
    import jax

    missing = -len(layout.order) % tile
    order = np.pad(layout.order, (0, missing), mode="edge")
    weights = np.pad(layout.weights, (0, missing))
    of_group = np.pad(layout.bin_of_group, (0, missing // layout.group), mode="edge")
    found: list[tuple[Any, Any, Any]] = []
    for start in range(0, len(order), tile):
        here = rows(order[start : start + tile])
        groups = slice(start // layout.group, (start + tile) // layout.group)
        with double_precision(here.dtype):
            held = jax.device_put(here), jax.device_put(weights[start : start + tile].astype(here.dtype))
        found.append((*held, of_group[groups]))
    return found


def _by_bin(sums: Any, x_bins: Any, y_bins: Any) -> Any:
    for axis, bins in ((1, x_bins), (2, y_bins)):
        sums = np.add.reduceat(sums, _starts(bins), axis=axis)
    return sums


def _starts(bins: Any) -> Any:
    return np.flatnonzero(np.concatenate([[True], bins[1:] != bins[:-1]]))


def _add(total: Any, sums: Any, x_bins: Any, y_bins: Any, same: bool) -> None:
    x, y = x_bins[_starts(x_bins)], y_bins[_starts(y_bins)]
    total[:, x[:, None], y[None, :]] += sums
    if not same:
        total[:, y[:, None], x[None, :]] += sums.transpose(0, 2, 1)
