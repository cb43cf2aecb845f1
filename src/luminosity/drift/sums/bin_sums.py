"""Sums of kernel values over pairs of bins, tile by tile: the matrix of all values is never held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from luminosity.drift.kernels import BlockKernel, Kernel
from luminosity.drift.sums.layout import DeviceStrips, Layout
from luminosity.drift.sums.tiles import sums_of_tiles
from luminosity.errors import DriftError

__all__ = ["Progress", "bin_sums", "bin_sums_of_lists"]

Progress = Callable[[int, int], None]  # tiles done, tiles in all

_STRIP_ROWS = 1024  # rows: a tile of single precision is 4 MB, which the caches of two cores hold
_ACCELERATOR_STRIP_ROWS = 16_384  # enough to keep one busy for much longer than a call takes
_SMALLEST_STRIP_ROWS = 64
_BINS_PER_STRIP = 128  # With many more it takes longer to tell values' bins than to compute values.
_GROUP = 8
_ROWS_PER_BIN = 4 * _GROUP  # from which on filling bins up to whole groups costs little
_TILES_BETWEEN_REPORTS = 64


def bin_sums(
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
    import jax

    devices = jax.local_devices()
    layout = Layout.of(bins, _GROUP if len(bins) >= _ROWS_PER_BIN * count else 1)
    blocks = DeviceStrips.of(layout, rows, _rows_per_strip(len(layout.order), count, devices), devices)
    tiles = list(_tiles(range(len(blocks.bins))))
    if boundary is not None:
        tiles = [(x, y) for x, y in tiles if blocks.bins[x][0] < boundary <= blocks.bins[y][-1]]
    total = np.zeros((len(kernels), count, count))
    for done, ((x, y), sums) in enumerate(sums_of_tiles(kernels, offsets, blocks, tiles), 1):
        _add(total, sums, blocks.bins[x], blocks.bins[y])
        if x != y:
            _add(total, sums.transpose(0, 2, 1), blocks.bins[y], blocks.bins[x])
        if progress is not None and (done % _TILES_BETWEEN_REPORTS == 0 or done == len(tiles)):
            progress(done, len(tiles))
    _check_finite(kernels, total)
    return total


def bin_sums_of_lists(
    kernels: Sequence[BlockKernel], things: Sequence[Any], bins: Any, count: int, progress: Progress | None = None
) -> Any:
    """The same for a user's function of two lists, in plain Python."""
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


def _tiles(blocks: range) -> Iterator[tuple[int, int]]:
    """Each pair of blocks once. Blocks beside themselves come first: they are computed in another way."""
    yield from zip(blocks, blocks, strict=True)
    yield from combinations(blocks, 2)


def _rows_per_strip(rows: int, count: int, devices: list[Any]) -> int:
    """A power of two, so that samples of many sizes share compiled code."""
    most = _STRIP_ROWS if devices[0].platform == "cpu" else _ACCELERATOR_STRIP_ROWS
    needed = min(rows, _BINS_PER_STRIP * rows // count)
    return min(most, max(_SMALLEST_STRIP_ROWS, 1 << (needed - 1).bit_length()))


def _add(total: Any, sums: Any, x_bins: Any, y_bins: Any) -> None:
    total[:, x_bins[:, None], y_bins[None, :]] += sums[:, : len(x_bins), : len(y_bins)]


def _by_bin(values: Any, bins: Any, count: int) -> Any:
    """Sums of rows that share a bin."""
    return (np.arange(count)[:, None] == bins[None, :]).astype(np.float64) @ values


def _check_finite(kernels: Sequence[Kernel], total: Any) -> None:
    for kernel, sums in zip(kernels, total, strict=True):
        if not np.isfinite(sums).all():
            raise DriftError(
                f"The kernel {kernel.name} gave infinity or NaN for some pairs of rows. Expected finite values; "
                "perhaps the numbers in the rows are too large for it: scale them, or try precision='float64'."
            )
