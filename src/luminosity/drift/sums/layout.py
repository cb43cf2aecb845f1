"""Sorts rows by bin and puts them onto devices, in strips of one size so that all strips share compiled code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.drift.rows import double_precision

__all__ = ["FILLER", "DeviceStrips", "Layout"]

FILLER = -1  # the place of a row that only fills up a strip
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
class DeviceStrips:
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
    def of(cls, layout: Layout, rows: Callable[[Any], Any], size: int, devices: list[Any]) -> DeviceStrips:
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
            places = np.where(is_filler[here], FILLER, places).astype(np.int32)
            values = rows(order[here])
            with double_precision(values.dtype):
                held.append(tuple(jax.device_put((values, places), device) for device in devices))
            of_strips.append(found)
        most = max(map(len, of_strips))
        places = max(_FEWEST_PLACES, 1 << (most - 1).bit_length())
        return cls(held, of_strips, places, layout.group, held[0][0][0].dtype)
