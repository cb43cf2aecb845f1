"""Sums of kernel values over tiles. A tile is a strip of rows against another strip, or against itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import groupby, islice
from typing import Any

import numpy as np

from luminosity.drift.kernels import Kernel, values_of_all
from luminosity.drift.rows import double_precision
from luminosity.drift.sums.layout import FILLER, DeviceStrips

__all__ = ["sums_of_tiles"]

_Tile = tuple[int, int]  # the numbers of two strips

_THREADS = 2  # the sums of one tile are fetched while the next one is computed
_AHEAD = 64  # calls that start before their sums are used


def sums_of_tiles(
    kernels: Sequence[Kernel], offsets: Sequence[float], strips: DeviceStrips, tiles: Iterable[_Tile]
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
    counts = (x_places != FILLER)[:, None].astype(x_rows.dtype)  # A product is faster than jnp.where.
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
