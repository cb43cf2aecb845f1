"""What a lake does so that workers write its files and one step commits them: Iceberg and Delta are two of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

__all__ = ["CommitNote", "Conflict", "DataFile", "Lake", "Layout", "Mode", "NewTable"]

Mode = Literal["append", "overwrite", "upsert", "create"]
"""What becomes of the rows that are there; ``"create"`` expects none."""


@dataclass(frozen=True)
class DataFile:
    """A complete file of a lake that no version of the table has yet. ``detail`` is what the commit needs."""

    path: str
    rows: int
    size: int
    detail: Any = None


@dataclass(frozen=True)
class CommitNote:
    """What a commit leaves in the table, so that it is recognised if it is repeated.

    The commits of a run have the numbers 0, 1, 2 …, and are made in this order.
    """

    run: str
    number: int
    window: str = ""

    def properties(self) -> dict[str, str]:
        """Return the note as texts: in an Iceberg snapshot's summary, or in the information of a Delta commit."""
        found = {"luminosity.run": self.run, "luminosity.commit": str(self.number)}
        return {**found, "luminosity.window": self.window} if self.window else found


@dataclass(frozen=True)
class NewTable:
    """How to make a table that does not exist."""

    schema: pa.Schema
    partition_by: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict[str, str])


class Layout(ABC):
    """How the data files of a table are written: columns, partitions, folders. It is sent to the workers."""

    name: str
    schema: pa.Schema
    """The columns of the table, as they are stored."""
    compression: str | None = None

    @abstractmethod
    def split(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, pa.RecordBatch]]:
        """Yield the rows of each partition, with what identifies it, as its files have them."""

    @abstractmethod
    def new_path(self, partition: Any, name: str) -> str:
        """Return the path of a new file."""

    @abstractmethod
    def staged_path(self, name: str) -> str:
        """Return the path of a new file that never becomes a part of the table."""

    @abstractmethod
    def open_output(self, path: str) -> Any:
        """Open a new file for writing. Its folder is made."""

    @abstractmethod
    def open_input(self, path: str) -> Any:
        """Open a file for reading."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file if it exists."""

    @abstractmethod
    def describe(self, path: str, partition: Any, metadata: Any, size: int) -> Any:
        """Return what the commit needs to know of a file, from its footer."""

    def local(self, path: str) -> str | None:
        """Return the path on this machine, or None if the file is elsewhere."""
        bare = path.removeprefix("file://")
        return None if "://" in bare else bare


class Lake(ABC):
    """A table to write. It is sent to the workers."""

    kind: str
    """The transform, for its counters."""
    name: str

    @abstractmethod
    def schema(self) -> pa.Schema | None:
        """Return the columns of the table, or None if it does not exist."""

    @abstractmethod
    def check(self, mode: Mode) -> None:
        """Raise if the table has something that is not written correctly, or this user may not write it."""

    @abstractmethod
    def check_new(self, new: NewTable) -> None:
        """Raise if a table can't have these partitions."""

    @abstractmethod
    def has_rows(self) -> bool:
        """Return whether the table exists and has rows."""

    @abstractmethod
    def create(self, new: NewTable) -> None:
        """Make the table unless it exists."""

    @abstractmethod
    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Add those columns that the table does not have yet."""

    @abstractmethod
    def layout(self) -> Layout:
        """Return how its files are written."""

    @abstractmethod
    def committed(self, note: CommitNote) -> int | None:
        """Return the version that a commit made, or None if it was not made."""

    @abstractmethod
    def commit(self, files: Sequence[DataFile], note: CommitNote, *, replace: bool) -> int:
        """Add the files to the table, or put them in the place of all others; return the new version.

        One attempt: raises :class:`Conflict` if another writer was faster, and nothing was changed.
        """

    @abstractmethod
    def upsert(self, rows: pa.RecordBatchReader, keys: Sequence[str], note: CommitNote) -> int:
        """Replace the rows with the same keys, add the others, and return the new version. Raises :class:`Conflict`."""

    @abstractmethod
    def version(self) -> int | None:
        """Return the version that the table has, or None if it has none yet."""


class Conflict(Exception):
    """Another writer committed first; the commit may be tried again."""
