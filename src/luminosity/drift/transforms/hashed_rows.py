"""Rows of a sample that travel together, with the hashes of their ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["HashedRows", "by_width", "first_fault", "stacked"]


@dataclass(frozen=True)
class HashedRows:
    """``bad`` rows were left out, since they can't be compared; ``fault`` says what is wrong with one of them."""

    hashes: Any
    rows: Any
    bad: int = 0
    fault: str = ""

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    def take(self, which: Any) -> HashedRows:
        """The rows with these numbers, or where this mask is true."""
        return HashedRows(self.hashes[which], self.rows[which])

    def pieces(self, most_bytes: int) -> Iterator[HashedRows]:
        """The same in blocks of no more bytes, but for single rows."""
        count = max(1, int(most_bytes // max(1, self.width * self.rows.itemsize)))
        if len(self) <= count:
            yield self
            return
        if self.bad:
            yield HashedRows(self.hashes[:0], self.rows[:0], self.bad, self.fault)
        for start in range(0, len(self), count):
            yield self.take(slice(start, start + count))


def stacked(blocks: Sequence[HashedRows]) -> HashedRows:
    """All of them in one. They are of one width."""
    if len(blocks) == 1:
        return blocks[0]
    return HashedRows(
        np.concatenate([block.hashes for block in blocks]),
        np.concatenate([block.rows for block in blocks]),
        sum(block.bad for block in blocks),
        first_fault(block.fault for block in blocks),
    )


def by_width(blocks: Iterable[HashedRows]) -> list[HashedRows]:
    """Stacked, those of one width each: whoever knows all rows will say what is wrong with that."""
    found: dict[int, list[HashedRows]] = {}
    for block in blocks:
        found.setdefault(block.width, []).append(block)
    return [stacked(alike) for alike in found.values()]


def first_fault(faults: Iterable[str]) -> str:
    """One of them, the same whatever their order."""
    return min(filter(None, faults), default="")
