"""Rows on their devices, in blocks of one size: samples of many sizes share compiled code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.drift.layout import Layout
from luminosity.drift.precision import double_precision

__all__ = ["FILLER", "Blocks", "Held"]

FILLER = -1  # the place of a row that counts for nothing
_FEWEST_PLACES = 8

Held = tuple[Any, Any]  # rows of a block, and for each its place among the block's bins


@dataclass(frozen=True)
class Blocks:
    """``bins`` says for each block which bin is at which place.

    Members of a group lie apart in a block: first the first of each group, then the second of each, and so on. A sum
    over groups is then a sum of whole matrices, which is what a CPU does best.
    """

    held: list[tuple[Held, ...]]  # of each block, on each device
    bins: list[Any]
    places: int
    group: int
    dtype: Any

    @classmethod
    def of(cls, layout: Layout, rows: Callable[[Any], Any], size: int, devices: list[Any]) -> Blocks:
        """The last one is filled up."""
        import jax

        missing = -len(layout.order) % size
        order = np.pad(layout.order, (0, missing), mode="edge")
        bins = np.pad(np.repeat(layout.bin_of_group, layout.group), (0, missing), mode="edge")
        is_filler = np.pad(layout.weights, (0, missing)) == 0
        held: list[tuple[Held, ...]] = []
        of_blocks: list[Any] = []
        for start in range(0, len(order), size):
            here = np.arange(start, start + size).reshape(-1, layout.group).T.ravel()
            found, places = np.unique(bins[here], return_inverse=True)
            places = np.where(is_filler[here], FILLER, places).astype(np.int32)
            values = rows(order[here])
            with double_precision(values.dtype):
                held.append(tuple(jax.device_put((values, places), device) for device in devices))
            of_blocks.append(found)
        most = max(map(len, of_blocks))
        places = max(_FEWEST_PLACES, 1 << (most - 1).bit_length())
        return cls(held, of_blocks, places, layout.group, held[0][0][0].dtype)
