"""Rows of a sample that are moved together, with the hashes of their ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["HashedRows", "by_width", "first_fault", "stacked"]


@dataclass(frozen=True)
class HashedRows:
    """Rows and their hashes. ``bad`` counts rows that were left out; ``fault`` says what is wrong with one of them."""

    hashes: Any
    rows: Any
    bad: int = 0
    fault: str = ""

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def width(self) -> int:
        """The numbers of a row."""
        return self.rows.shape[1]

    def take(self, which: Any) -> HashedRows:
        """Return the rows with these numbers, or the rows that this mask selects."""
        return HashedRows(self.hashes[which], self.rows[which])

    def pieces(self, most_bytes: int) -> Iterator[HashedRows]:
        """Yield the rows in pieces of at most ``most_bytes``; a piece has at least one row."""
        count = max(1, int(most_bytes // max(1, self.width * self.rows.itemsize)))
        if len(self) <= count:
            yield self
            return
        if self.bad:
            yield HashedRows(self.hashes[:0], self.rows[:0], self.bad, self.fault)
        for start in range(0, len(self), count):
            yield self.take(slice(start, start + count))


def stacked(pieces: Sequence[HashedRows]) -> HashedRows:
    """Return all rows in one piece. They have the same width."""
    if len(pieces) == 1:
        return pieces[0]
    return HashedRows(
        np.concatenate([piece.hashes for piece in pieces]),
        np.concatenate([piece.rows for piece in pieces]),
        sum(piece.bad for piece in pieces),
        first_fault(piece.fault for piece in pieces),
    )


def by_width(pieces: Iterable[HashedRows]) -> list[HashedRows]:
    """Return the rows of each width in one piece. The summary of all rows reports different widths as an error."""
    found: dict[int, list[HashedRows]] = {}
    for piece in pieces:
        found.setdefault(piece.width, []).append(piece)
    return [stacked(alike) for alike in found.values()]


def first_fault(faults: Iterable[str]) -> str:
    """Return one of the faults, the same in whatever order they come."""
    return min(filter(None, faults), default="")
