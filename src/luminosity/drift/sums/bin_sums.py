"""Sums of kernel values over pairs of bins, tile by tile: memory never holds the matrix of all values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from luminosity.drift.kernels import BlockKernel, Kernel
from luminosity.drift.result import Progress
from luminosity.drift.sums.layout import DeviceStrips, Layout
from luminosity.drift.sums.tiles import sums_of_tiles
from luminosity.errors import DriftError, Fix

__all__ = ["bin_sums", "bin_sums_of_lists"]

"""A function that is called with the number of tiles done, and of all tiles."""

_STRIP_ROWS = 1024  # a tile of single precision takes 4 MB, which the caches of two cores hold
_ACCELERATOR_STRIP_ROWS = 16_384  # a tile keeps an accelerator busy for much longer than a call takes
_SMALLEST_STRIP_ROWS = 64
_BINS_PER_STRIP = 128  # with many more, sorting values into bins takes longer than computing them
_GROUP = 8  # rows of a bin that are summed before they are assigned to it
_ROWS_PER_BIN = 4 * _GROUP  # from here on, filling bins up to whole groups costs little
_TILES_BETWEEN_REPORTS = 64  # to report progress a few times per second


def bin_sums(
    kernels: Sequence[Kernel],
    offsets: Sequence[float],
    rows: Callable[[Any], Any],
    bins: Any,
    count: int,
    progress: Progress | None = None,
    boundary: int | None = None,
) -> Any:
    """Return, for each kernel, the symmetric matrix of sums of its values less its offset, by pairs of bins.

    Sums run over ordered pairs of different rows. ``rows`` is a function that returns the rows with the given numbers,
    ready to compute with. ``bins`` is the bin of each row, from 0 to ``count``. With a ``boundary``, only sums over a
    bin below it and a bin from it on are complete: other tiles may be left out.
    """
    import jax

    devices = jax.local_devices()
    layout = Layout.of(bins, _GROUP if len(bins) >= _ROWS_PER_BIN * count else 1)
    strips = DeviceStrips.of(layout, rows, _rows_per_strip(len(layout.order), count, devices), devices)
    tiles = list(_tiles(range(len(strips.bins))))
    if boundary is not None:
        tiles = [(x, y) for x, y in tiles if strips.bins[x][0] < boundary <= strips.bins[y][-1]]
    total = np.zeros((len(kernels), count, count))
    for done, ((x, y), sums) in enumerate(sums_of_tiles(kernels, offsets, strips, tiles), 1):
        _add(total, sums, strips.bins[x], strips.bins[y])
        if x != y:
            _add(total, sums.transpose(0, 2, 1), strips.bins[y], strips.bins[x])
        if progress is not None and (done % _TILES_BETWEEN_REPORTS == 0 or done == len(tiles)):
            progress(done, len(tiles))
    _check_finite(kernels, total)
    return total


def bin_sums_of_lists(
    kernels: Sequence[BlockKernel], things: Sequence[Any], bins: Any, count: int, progress: Progress | None = None
) -> Any:
    """Return the same sums for kernels that are functions of two lists, computed in plain Python."""
    total = np.zeros((len(kernels), count, count))
    parts = [slice(start, start + _STRIP_ROWS) for start in range(0, len(things), _STRIP_ROWS)]
    in_all = len(parts) * (len(parts) + 1) // 2
    for done, (x, y) in enumerate(_tiles(range(len(parts))), 1):
        for index, kernel in enumerate(kernels):
            values = kernel.values((), things[parts[x]], things[parts[y]])
            if x == y:
                values = np.where(np.eye(len(values), dtype=bool), 0, values)
            sums = _by_bin(_by_bin(values, bins[parts[x]], count).T, bins[parts[y]], count).T
            total[index] += sums if x == y else sums + sums.T
        if progress is not None:
            progress(done, in_all)
    _check_finite(kernels, total)
    return total


def _tiles(strips: range) -> Iterator[tuple[int, int]]:
    """Yield each pair of strips once. Pairs of a strip with itself come first: other code computes them."""
    yield from zip(strips, strips, strict=True)
    yield from combinations(strips, 2)


def _rows_per_strip(rows: int, count: int, devices: list[Any]) -> int:
    """Return a power of two, so that samples of many sizes share compiled code."""
    most = _STRIP_ROWS if devices[0].platform == "cpu" else _ACCELERATOR_STRIP_ROWS
    needed = min(rows, _BINS_PER_STRIP * rows // count)
    return min(most, max(_SMALLEST_STRIP_ROWS, 1 << (needed - 1).bit_length()))


def _add(total: Any, sums: Any, x_bins: Any, y_bins: Any) -> None:
    total[:, x_bins[:, None], y_bins[None, :]] += sums[:, : len(x_bins), : len(y_bins)]


def _by_bin(values: Any, bins: Any, count: int) -> Any:
    """Return sums of rows that share a bin."""
    return (np.arange(count)[:, None] == bins[None, :]).astype(np.float64) @ values


def _check_finite(kernels: Sequence[Kernel], total: Any) -> None:
    for kernel, sums in zip(kernels, total, strict=True):
        if not np.isfinite(sums).all():
            raise DriftError(
                f"the kernel {kernel.name} gave infinity or NaN for some pairs of rows, expected finite values; "
                "perhaps the numbers in the rows are too large for it",
                fix=Fix("scale them, or pass precision='float64'", command="scale them"),
            )
