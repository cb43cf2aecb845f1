"""The interface of a table that is read by its name, such as ``delta:sales``: its columns, its parts, their readers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.reader import ByteRange, Claim, Reader
from luminosity.io.reading.selection import Selection

__all__ = ["FollowedTable", "NamedTable", "NewVersion", "Part", "RowsReader"]


@dataclass(frozen=True)
class Part(TableFile):
    """A part of a table that is read by its name: mostly a file. ``detail`` is what only its own table understands."""

    rows: int | None = 0
    """The number of its rows; None is not known."""
    detail: Any = None


class NamedTable(ABC):
    """A table that is found by its name. It is opened and checked before the run, and sent to the workers."""

    name: str
    """What messages call it."""

    stored: pa.Schema
    """The columns of the rows in its parts."""

    partition: pa.Schema = pa.schema([])
    """The columns that each part has one value of, in ``Part.partition`` as a text."""

    @abstractmethod
    def parts(self, where: Any) -> list[Part]:
        """Return the parts that may have rows on which the condition holds; ``where`` may be None."""

    @abstractmethod
    def reader(self, part: Part, selection: Selection, rows_per_batch: int) -> Reader:
        """Open a part, in a worker. The caller closes the reader."""


class NewVersion(NamedTuple):
    """A version of a table, and the parts with the rows that it added."""

    version: int | None  # None for a table without any
    micros: int  # when it was committed, since 1970
    parts: list[Part]


class FollowedTable(NamedTable):
    """A table whose versions have an order, so that a stream can follow it."""

    kind: str
    """The transform, for its counters."""

    @abstractmethod
    def opened(self, parts: list[Part]) -> NewVersion:
        """Return the version at which the table was opened, with these parts."""

    @abstractmethod
    def newer(self, version: int | None, where: Any) -> list[NewVersion]:
        """Return the versions after this one, the oldest first, with the parts that may have rows for ``where``.

        Raises :class:`TableError` if one of them did more than append rows, or is not there any more.
        """


class RowsReader(Reader, ABC):
    """Reads a part whose rows have numbers, such as a range of a dataset. It may be cut between batches."""

    def __init__(self, part: Part, rows_per_batch: int) -> None:
        self._part = part
        self._count = part.rows or 0
        self._rows = rows_per_batch

    @abstractmethod
    def take(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows with these numbers, with the loaded columns."""

    def cuts(self) -> list[int]:
        """Return the positions of the batches."""
        return [self._position(row) for row in range(0, self._count, self._rows)]

    def batches(self, byte_range: ByteRange, claim: Claim) -> Iterator[pa.RecordBatch]:
        """Yield the batches that begin in this range."""
        for row in range(0, self._count, self._rows):
            position = self._position(row)
            if position < byte_range.start:
                continue
            if claim(position + 1) <= position:
                return
            yield from self.take(row, min(row + self._rows, self._count))

    def close(self) -> None:
        """Do nothing: the dataset belongs to the process."""

    def _position(self, row: int) -> int:
        """Return the byte at which a row is assumed to begin."""
        return self._part.size * row // max(1, self._count)
