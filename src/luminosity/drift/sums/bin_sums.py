"""Sums of kernel values over pairs of bins, tile by tile: memory never holds the matrix of all values.

Rows are sorted by bin and put onto devices in strips of one size, so that all strips share compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations, groupby, islice
from typing import Any

import numpy as np

from luminosity.drift.kernels import BlockKernel, Kernel, values_of_all
from luminosity.drift.result import Progress
from luminosity.drift.rows import double_precision
from luminosity.errors import DriftError, Fix

__all__ = ["bin_sums", "bin_sums_of_lists", "sums_of_tiles"]

_FILLER = -1  # the place of a row that only fills up a strip
_FEWEST_PLACES = 8  # places of bins in a strip: fewer would compile code for each number of bins
_Held = tuple[Any, Any]  # rows of a strip, and for each row the place of its bin among the strip's bins


@dataclass(frozen=True)
class Layout:
    """Row numbers sorted by bin, with each bin filled up to whole groups of rows.

    Sums over groups are then sums over parts of bins. ``order`` holds row numbers; a ``weight`` of zero marks a filler.
    """

    order: Any
    weights: Any
    bin_of_group: Any
    group: int

    @classmethod
    def of(cls, bins: Any, group: int) -> Layout:
        """Return the layout for the bin of each row.

        >>> layout = Layout.of(np.array([1, 0, 1, 1]), group=2)
        >>> layout.order, layout.weights, layout.bin_of_group
        (array([1, 1, 0, 2, 3, 3]), array([1., 0., 1., 1., 1., 0.]), array([0, 1, 1]))
        """
        by_bin = np.argsort(bins, kind="stable")
        found, counts = np.unique(bins, return_counts=True)
        groups = -(-counts // group)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        filled_starts = np.concatenate([[0], np.cumsum(groups * group)[:-1]])
        position = np.arange(int(groups.sum()) * group) - np.repeat(filled_starts, groups * group)
        counts_here = np.repeat(counts, groups * group)
        within = np.minimum(position, counts_here - 1)
        return cls(
            order=by_bin[np.repeat(starts, groups * group) + within],
            weights=(position < counts_here).astype(np.float64),
            bin_of_group=np.repeat(found, groups),
            group=group,
        )


@dataclass(frozen=True)
class _DeviceStrips:
    """Strips of rows on their devices. ``bins`` holds, for each strip, the bin at each place.

    Members of a group lie apart in a strip: first the first member of each group, then the second of each, and so on. A
    sum over groups is then a sum of whole matrices, which a CPU computes fastest.
    """

    held: list[tuple[_Held, ...]]  # of each strip, on each device
    bins: list[Any]
    places: int
    group: int
    dtype: Any

    @classmethod
    def of(cls, layout: Layout, rows: Callable[[Any], Any], size: int, devices: list[Any]) -> _DeviceStrips:
        """Cut the rows into strips of ``size`` rows, and copy each to all devices. The last strip is filled up."""
        import jax

        missing = -len(layout.order) % size
        order = np.pad(layout.order, (0, missing), mode="edge")
        bins = np.pad(np.repeat(layout.bin_of_group, layout.group), (0, missing), mode="edge")
        is_filler = np.pad(layout.weights, (0, missing)) == 0
        held: list[tuple[_Held, ...]] = []
        of_strips: list[Any] = []
        for start in range(0, len(order), size):
            here = np.arange(start, start + size).reshape(-1, layout.group).T.ravel()
            found, places = np.unique(bins[here], return_inverse=True)
            places = np.where(is_filler[here], _FILLER, places).astype(np.int32)
            values = rows(order[here])
            with double_precision(values.dtype):
                held.append(tuple(jax.device_put((values, places), device) for device in devices))
            of_strips.append(found)
        most = max(map(len, of_strips))
        places = max(_FEWEST_PLACES, 1 << (most - 1).bit_length())
        return cls(held, of_strips, places, layout.group, held[0][0][0].dtype)


_Tile = tuple[int, int]  # the numbers of two strips
_THREADS = 2  # the sums of one tile are fetched while the next one is computed
_AHEAD = 64  # calls that start before their sums are used


def sums_of_tiles(
    kernels: Sequence[Kernel], offsets: Sequence[float], strips: _DeviceStrips, tiles: Iterable[_Tile]
) -> Iterator[tuple[_Tile, Any]]:
    """Yield for each tile and each kernel the sums of its values less its offset, by the bins of both strips.

    A row is never paired with itself. An offset near the mean of the kernel leaves MMD² unchanged, and keeps the digits
    that matter in single precision.
    """
    number = strips.dtype.type
    parameters = [tuple(map(number, kernel.parameters())) for kernel in kernels]
    forms = tuple(kernel.form() for kernel in kernels)
    devices = len(strips.held[0])

    def compute(tiles: list[_Tile]) -> list[tuple[_Tile, Any]]:
        """Compute one tile on each device. With fewer tiles than devices, the last tile is computed more than once."""
        filled = tiles + tiles[-1:] * (devices - len(tiles))
        same = tiles[0][0] == tiles[0][1]
        with double_precision(strips.dtype):
            run = _compiled(forms, strips.group, strips.places, same, devices)
            held = [_spread([strips.held[tile[side]][at] for at, tile in enumerate(filled)]) for side in (0, 1)]
            sums = np.asarray(run(parameters, list(map(number, offsets)), *held), dtype=np.float64)
        return list(zip(tiles, np.split(sums, devices), strict=False))

    with ThreadPoolExecutor(_THREADS) as threads:
        calls = _calls(tiles, devices)
        while begun := list(islice(calls, _AHEAD)):
            for found in threads.map(compute, begun):
                yield from found


def _calls(tiles: Iterable[_Tile], devices: int) -> Iterator[list[_Tile]]:
    """Yield one tile for each device. A call has only tiles of a strip with itself, or none of them."""
    for _, alike in groupby(tiles, lambda tile: tile[0] == tile[1]):
        while call := list(islice(alike, devices)):
            yield call


def _tile_sums(
    forms: tuple[Kernel, ...], group: int, places: int, same: bool, parameters: Any, offsets: Any, x: Any, y: Any
) -> Any:
    import jax.numpy as jnp

    (x_rows, x_places), (y_rows, y_places) = x, y
    counts = (x_places != _FILLER)[:, None].astype(x_rows.dtype)  # A product is faster than jnp.where.
    if same:
        numbers = jnp.arange(len(x_rows))
        counts *= numbers[:, None] != numbers[None, :]
    in_x = (jnp.arange(places)[:, None] == x_places[None, : len(x_rows) // group]).astype(x_rows.dtype)
    in_y = (y_places[:, None] == jnp.arange(places)[None, :]).astype(y_rows.dtype)

    def by_bins(values: Any, offset: Any) -> Any:
        members = ((values - offset) * counts).reshape(group, -1, len(y_rows))
        by_group = sum(members[number] for number in range(group))
        return jnp.matmul(in_x, jnp.matmul(by_group, in_y, precision="highest"), precision="highest")

    values = values_of_all(forms, parameters, x_rows, y_rows)
    return jnp.stack([by_bins(*each) for each in zip(values, offsets, strict=True)])


@lru_cache(maxsize=64)
def _compiled(forms: tuple[Kernel, ...], group: int, places: int, same: bool, devices: int) -> Any:
    """Return the compiled function. Each of several devices computes its own tile; their sums are concatenated."""
    import jax
    from jax.sharding import PartitionSpec

    run = partial(_tile_sums, forms, group, places, same)
    if devices > 1:
        spread, everywhere = PartitionSpec("tiles"), PartitionSpec()
        specs = everywhere, everywhere, spread, spread
        # Devices exchange nothing. The check of replication would reject loops inside of users' kernels.
        run = jax.shard_map(run, mesh=_mesh(devices), in_specs=specs, out_specs=spread, check_vma=False)
    return jax.jit(run)


@lru_cache(maxsize=1)
def _mesh(devices: int) -> Any:
    import jax
    from jax.sharding import Mesh

    return Mesh(np.array(jax.local_devices()[:devices]), ("tiles",))


def _spread(held: list[Any]) -> Any:
    """Return strips that lie on several devices as arrays spread over these devices, without moving data."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    if len(held) == 1:
        return held[0]
    sharding = NamedSharding(_mesh(len(held)), PartitionSpec("tiles"))
    return tuple(
        jax.make_array_from_single_device_arrays((sum(map(len, parts)), *parts[0].shape[1:]), sharding, list(parts))
        for parts in zip(*held, strict=True)
    )


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
    strips = _DeviceStrips.of(layout, rows, _rows_per_strip(len(layout.order), count, devices), devices)
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
