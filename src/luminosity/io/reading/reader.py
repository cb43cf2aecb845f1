"""What a format must be able to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import pyarrow as pa

from luminosity.io.reading.ranges import EVERYTHING

__all__ = ["Claim", "Reader", "claim_whole"]

Claim = Callable[[int], int]
"""Claims what begins before a byte of the file; says up to where it was granted."""


class Reader(ABC):
    """An open file of a table. It was checked against the table's schema when it was opened."""

    def cuts(self) -> list[int] | None:
        """Where it may be cut into pieces before it is read; None: anywhere."""
        return None

    @abstractmethod
    def batches(self, start: int, stop: int, claim: Claim) -> Iterator[pa.RecordBatch]:
        """What begins in this range: the columns that are loaded, in any order. Claimed before it is given.

        `stop` says how far reading ahead is of use; what counts is what `claim` grants.
        """

    @abstractmethod
    def close(self) -> None: ...


def claim_whole(start: int, claim: Claim) -> bool:
    """Whether to read a file that can't be cut: it belongs to the range that has its first byte."""
    return start == 0 and claim(EVERYTHING) > 0
