"""A sample cut into strips, so that many workers compare it: each pair of strips is a tile, and an element.

A row's strip comes from its hash, as its bin does: no row needs to know of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.drift.transforms.summary import Summary

__all__ = ["CUTTING", "Cutting", "StripCounts", "strip_of"]


@dataclass(frozen=True)
class StripCounts:
    """How many there are of each sample. The reference's come first; with none of the current sample, its rows are in
    the reference's only one."""

    reference: int
    current: int

    @property
    def all(self) -> int:
        return self.reference + self.current

    def tiles(self) -> Iterator[tuple[int, int]]:
        """All pairs of strips, each once, and each with itself.

        >>> list(Strips(1, 1).tiles())
        [(0, 0), (0, 1), (1, 1)]
        """
        return ((first, second) for first in range(self.all) for second in range(first, self.all))

    def tiles_of(self, strip: int) -> Iterator[tuple[int, int]]:
        """
        >>> list(Strips(2, 1).tiles_of(1))
        [(0, 1), (1, 1), (1, 2)]
        """
        return ((min(strip, other), max(strip, other)) for other in range(self.all))

    def numbers(self, hashes: Any, of_reference: bool) -> Any:
        """The strip of each row."""
        if of_reference or self.current == 0:
            return strip_of(hashes, self.reference)
        return strip_of(hashes, self.current) + self.reference


@dataclass(frozen=True)
class Cutting:
    """Into how many strips: few, since each row is sent to as many tiles; but so many that all workers have some."""

    few_rows: int = 16_384  # of both samples: compared by one worker in about a second
    strip_rows: int = 8_192
    enough_strips: int = 32  # of one sample: of both that is two thousand tiles
    strip_bytes: int = 24 << 20  # which may mean more of them

    def of_sample(self, sample: Summary) -> int:
        by_rows = min(self.enough_strips, -(-sample.rows // self.strip_rows))
        return max(1, by_rows, -(-sample.rows * sample.bytes_per_row // self.strip_bytes))

    def of_both(self, reference: Summary, current: Summary) -> StripCounts:
        strips = self.of_sample(reference), self.of_sample(current)
        are_few = strips == (1, 1) and reference.rows + current.rows <= self.few_rows
        return StripCounts(1, 0) if are_few else StripCounts(*strips)


CUTTING = Cutting()


def strip_of(hashes: Any, strips: int) -> Any:
    """Small hashes come in the first: a strip is a range of them."""
    return ((hashes >> np.uint64(32)) * np.uint64(strips) >> np.uint64(32)).astype(np.int64)
