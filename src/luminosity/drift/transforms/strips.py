"""Cuts samples into strips, so that many workers can compare them. Each pair of strips is a tile, one element.

The hash of a row decides its strip, as it decides its bin, independent of all other rows.
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
    """The number of strips of each sample. The reference's strips come first.

    If the current sample has no strips, its rows are in the reference's only strip.
    """

    reference: int
    current: int

    @property
    def all(self) -> int:
        """The number of strips of both samples."""
        return self.reference + self.current

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Return all pairs of strips, each pair once, and each strip with itself.

        >>> list(StripCounts(1, 1).tiles())
        [(0, 0), (0, 1), (1, 1)]
        """
        return ((first, second) for first in range(self.all) for second in range(first, self.all))

    def tiles_of(self, strip: int) -> Iterator[tuple[int, int]]:
        """Return the tiles that a strip is part of.

        >>> list(StripCounts(2, 1).tiles_of(1))
        [(0, 1), (1, 1), (1, 2)]
        """
        return ((min(strip, other), max(strip, other)) for other in range(self.all))

    def numbers(self, hashes: Any, of_reference: bool) -> Any:
        """Return the strip of each row."""
        if of_reference or self.current == 0:
            return strip_of(hashes, self.reference)
        return strip_of(hashes, self.current) + self.reference


@dataclass(frozen=True)
class Cutting:
    """Decides the number of strips: few, because each row is sent to as many tiles; enough for all workers."""

    few_rows: int = 16_384  # rows of both samples: one worker compares them in about a second
    strip_rows: int = 8_192  # rows of a strip
    enough_strips: int = 32  # strips of one sample: both samples have two thousand tiles
    strip_bytes: int = 24 << 20  # bytes of a strip; wide rows may need more strips

    def of_sample(self, sample: Summary) -> int:
        """Return the number of strips of one sample."""
        by_rows = min(self.enough_strips, -(-sample.rows // self.strip_rows))
        return max(1, by_rows, -(-sample.rows * sample.bytes_per_row // self.strip_bytes))

    def of_both(self, reference: Summary, current: Summary) -> StripCounts:
        """Return the number of strips of both samples."""
        strips = self.of_sample(reference), self.of_sample(current)
        are_few = strips == (1, 1) and reference.rows + current.rows <= self.few_rows
        return StripCounts(1, 0) if are_few else StripCounts(*strips)


CUTTING = Cutting()


def strip_of(hashes: Any, strips: int) -> Any:
    """Return the strip of each hash. A strip is a range of hashes, the smallest hashes come first."""
    return ((hashes >> np.uint64(32)) * np.uint64(strips) >> np.uint64(32)).astype(np.int64)
