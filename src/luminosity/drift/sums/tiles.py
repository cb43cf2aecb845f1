"""Sums of kernel values over tiles, each some rows against some rows. All large sums are made of these."""

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

_Tile = tuple[int, int]  # the numbers of two blocks

_THREADS = 2  # The sums of one tile are fetched while the next one is computed.
_AHEAD = 64  # calls begun before their sums are taken


def sums_of_tiles(
    kernels: Sequence[Kernel], offsets: Sequence[float], blocks: DeviceStrips, tiles: Iterable[_Tile]
) -> Iterator[tuple[_Tile, Any]]:
    """For each tile, and each kernel, its values less its offset, summed by the bins of both blocks.

    A block beside itself leaves out each row with itself. An offset near the mean of the kernel leaves MMD² as it is,
    and keeps in single precision the digits that matter.
    """
    number = blocks.dtype.type
    parameters = [tuple(map(number, kernel.parameters())) for kernel in kernels]
    forms = tuple(kernel.form() for kernel in kernels)
    devices = len(blocks.held[0])

    def compute(tiles: list[_Tile]) -> list[tuple[_Tile, Any]]:
        """One for each device. Where they are fewer, the last is computed more than once."""
        filled = tiles + tiles[-1:] * (devices - len(tiles))
        same = tiles[0][0] == tiles[0][1]
        with double_precision(blocks.dtype):
            run = _compiled(forms, blocks.group, blocks.places, same, devices)
            held = [_spread([blocks.held[tile[side]][at] for at, tile in enumerate(filled)]) for side in (0, 1)]
            sums = np.asarray(run(parameters, list(map(number, offsets)), *held), dtype=np.float64)
        return list(zip(tiles, np.split(sums, devices), strict=False))

    with ThreadPoolExecutor(_THREADS) as threads:
        calls = _calls(tiles, devices)
        while begun := list(islice(calls, _AHEAD)):
            for found in threads.map(compute, begun):
                yield from found


def _calls(tiles: Iterable[_Tile], devices: int) -> Iterator[list[_Tile]]:
    """One tile for each device, all of a block beside itself, or none."""
    for _, alike in groupby(tiles, lambda tile: tile[0] == tile[1]):
        while call := list(islice(alike, devices)):
            yield call


def _tile_sums(
    forms: tuple[Kernel, ...], group: int, places: int, same: bool, parameters: Any, offsets: Any, x: Any, y: Any
) -> Any:
    import jax.numpy as jnp

    (x_rows, x_places), (y_rows, y_places) = x, y
    counts = (x_places != FILLER)[:, None].astype(x_rows.dtype)  # A product costs less than a choice.
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
    """On several devices each computes a tile of its own, and sums lie one after the other."""
    import jax
    from jax.sharding import PartitionSpec

    run = partial(_tile_sums, forms, group, places, same)
    if devices > 1:
        spread, everywhere = PartitionSpec("tiles"), PartitionSpec()
        specs = everywhere, everywhere, spread, spread
        # Devices exchange nothing. The check that they do it right would reject loops inside of users' kernels.
        run = jax.shard_map(run, mesh=_mesh(devices), in_specs=specs, out_specs=spread, check_vma=False)
    return jax.jit(run)


@lru_cache(maxsize=1)
def _mesh(devices: int) -> Any:
    import jax
    from jax.sharding import Mesh

    return Mesh(np.array(jax.local_devices()[:devices]), ("tiles",))


def _spread(held: list[Any]) -> Any:
    """Blocks on several devices as arrays that are spread over them; nothing moves."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    if len(held) == 1:
        return held[0]
    sharding = NamedSharding(_mesh(len(held)), PartitionSpec("tiles"))
    return tuple(
        jax.make_array_from_single_device_arrays((sum(map(len, parts)), *parts[0].shape[1:]), sharding, list(parts))
        for parts in zip(*held, strict=True)
    )
