"""A Delta table at one version: its columns, its data files, how they are read, and the changes between versions."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from luminosity._shared.text import first_line
from luminosity.errors import Fix, InvalidArgument, LuminosityError, TableError, may_pass
from luminosity.extras import require
from luminosity.io.formats import Format
from luminosity.io.lakes.columns import with_plain_types
from luminosity.io.lakes.part_reader import Bounds, PartReader, possible_parts
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.named_table import NamedTable, Part
from luminosity.io.reading.reader import ByteRange, Claim, Reader, claim_whole
from luminosity.io.reading.selection import Selection

__all__ = ["DeltaAddress", "DeltaChanges", "DeltaTable", "features_in_use"]

_READ = frozenset({"timestampNtz", "deletionVectors", "v2Checkpoint", "vacuumProtocolCheck"})
"""The features of tables that this reader knows."""
_COARSE = datetime.timedelta(milliseconds=1)  # to which some writers cut times in statistics
_SHOWN_CHARACTERS = 300  # of an error of a library


@dataclass(frozen=True)
class DeltaAddress:
    """The folder of a table, on this machine or on a store that deltalake knows; ``options`` has the credentials."""

    path: str
    options: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    @classmethod
    def of(cls, path: str, options: Mapping[str, str] | None) -> DeltaAddress:
        """Return the address. Workers may run in another folder, so that paths are made absolute."""
        require("deltalake", "delta")
        return cls(path if "://" in path else os.path.abspath(path), dict(options or {}))

    @property
    def is_local(self) -> bool:
        """Whether the table is in a folder of this machine."""
        return "://" not in self.path

    def find(self, at: Any = None) -> Any:
        """Return the table at a version or time, or None if there is no table."""
        from deltalake import DeltaTable as Table
        from deltalake.exceptions import TableNotFoundError

        if isinstance(at, bool) or not isinstance(at, int | datetime.datetime | None):
            raise InvalidArgument(f"{self}: found the version {at!r}, expected a number or a time")
        with self.errors():
            if self.is_local and not os.path.isdir(os.path.join(self.path, "_delta_log")):
                return None  # deltalake would make the folder
            try:
                table = Table(self.path, storage_options=dict(self.options) or None)
            except TableNotFoundError:
                return None
            newest = table.version()
            if at is None or at == newest:
                return table
            if isinstance(at, int) and not 0 <= at <= newest:
                raise TableError(f"{self}: found the version {at}, expected 0 to {newest}")
            if isinstance(at, int):
                table.load_as_version(at)
                return table
            at = at.astimezone(datetime.timezone.utc)  # a time without a zone is that of this machine
            table.load_as_version(at)
            if (made := _made_at(table)) is not None and at < made:
                raise TableError(
                    f"{self}: found the time {at.isoformat()}, expected {made.isoformat()}, its first version, or later"
                )
            return table

    def load(self, at: Any = None) -> Any:
        """Return the table. Raises if there is none."""
        found = self.find(at)
        if found is None:
            raise TableError(f"{self}: no Delta table: {self._instead()}")
        return found

    def _instead(self) -> str:
        if not self.is_local:
            return "it has no folder _delta_log"
        if not os.path.isdir(self.path):
            return "the folder does not exist"
        return "the folder has no _delta_log in it"

    @contextlib.contextmanager
    def errors(self) -> Generator[None]:
        """Turn the errors of deltalake into a ``TableError``."""
        require("deltalake", "delta")
        from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

        try:
            yield
        except (LuminosityError, CommitFailedError, TableNotFoundError):
            raise
        except Exception as error:
            # deltalake also raises plain Exceptions.
            if type(error) is not Exception and not isinstance(error, DeltaError | OSError | ValueError):
                raise
            text = first_line(str(error) or type(error).__name__, _SHOWN_CHARACTERS)
            fix = None
            if not self.is_local and any(
                word in str(error).lower() for word in ("credential", "forbidden", "403", "401")
            ):
                fix = Fix(
                    "pass storage_options= with the credentials", command="set the credentials in the environment"
                )
            raise TableError(
                f"{self}: can't be used: {text}", fix=fix, may_pass=may_pass(error, in_user_code=False)
            ) from error

    def open_file(self, path: str) -> Any:
        """Open a data file."""
        if "://" not in path:
            return pa.OSFile(path)
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        folder, _, name = path.rpartition("/")
        system = PyFileSystem(DeltaStorageHandler(folder, dict(self.options) or None))
        return system.open_input_file(name)

    def join(self, name: str) -> str:
        """Return the path of a data file from its name in the log, which may be a whole address."""
        return name if "://" in name else f"{self.path.rstrip('/')}/{unquote(name)}"

    def __str__(self) -> str:
        return f"delta:{self.path}"


class DeltaTable(NamedTable):
    """A version of a Delta table, or the rows that were appended after another version."""

    def __init__(self, address: DeltaAddress, at: Any = None, since: Any = None) -> None:
        self.name = str(address)
        self._address = address
        table = address.load(at)
        _check_features(self.name, table)
        self.version = int(table.version())
        whole = pa.schema(table.schema().to_arrow())
        by: list[str] = table.metadata().partition_columns
        plain = with_plain_types(whole)
        self._whole = plain
        self.stored = pa.schema([each for each in plain if each.name not in by])
        self.partition = pa.schema([plain.field(name) for name in by])
        self._table: Any = table
        self._old: set[str] = set()
        if since is not None:
            self._old = _appended_after(self.name, address.load(since), table)

    def parts(self, where: Any) -> list[Part]:
        """Return the data files, except those whose statistics exclude the condition."""
        with self._address.errors():
            actions = pa.table(self._table.get_add_actions(flatten=True)).to_pylist()
            deleted = _deleted(self._table)
        self._table = None  # not sent to workers
        found = [self._part(action, deleted) for action in actions if action["path"] not in self._old]
        return sorted(possible_parts(found, self._whole, where), key=lambda part: part.path)

    def _part(self, action: dict[str, Any], deleted: Mapping[str, bytes]) -> tuple[Part, Mapping[str, Bounds]]:
        path, rows = self._address.join(action["path"]), action["num_records"]
        values = {name: action[f"partition.{name}"] for name in self.partition.names}
        texts = tuple((name, None if value is None else _text(value)) for name, value in values.items())
        bounds = {name: _bounds(name, action) for name in self.stored.names}
        known = {name: Bounds(value, value, 0) for name, value in values.items() if value is not None}
        kept = deleted.get(path)
        if rows is None:
            rows = self._count(path)
        if kept is not None:
            rows = int(np.unpackbits(np.frombuffer(kept, np.uint8)).sum())
        part = Part(path, action["size_bytes"], Format.PARQUET, None, texts, rows=rows, detail=kept)
        return part, {**bounds, **known}

    def _count(self, path: str) -> int:
        from pyarrow import parquet

        with self._address.open_file(path) as source:
            return parquet.read_metadata(source).num_rows

    def reader(self, part: Part, selection: Selection, rows_per_batch: int) -> Reader:
        """Open a data file."""
        kept = None
        if part.detail is not None:
            kept = np.unpackbits(np.frombuffer(part.detail, np.uint8)).astype(bool)
        return PartReader(part, selection, rows_per_batch, self._open, kept=kept)

    def _open(self, file: TableFile) -> Any:
        return self._address.open_file(file.path)


class DeltaChanges(NamedTable):
    """The rows that were inserted, updated and deleted between two versions, as the table recorded them.

    The columns ``_change_type``, ``_commit_version`` and ``_commit_timestamp`` say what happened.
    """

    def __init__(self, address: DeltaAddress, first: int, last: int | None) -> None:
        self.name = str(address)
        self._address, self._first = address, first
        table = address.load()
        if table.metadata().configuration.get("delta.enableChangeDataFeed") != "true":
            raise TableError(
                f"{self.name}: the table does not record changes, expected delta.enableChangeDataFeed=true",
                fix=Fix("read the rows that were appended with since=, or let the table record changes from now on"),
            )
        newest = int(table.version())
        self.last = newest if last is None else last
        is_number = isinstance(first, int) and not isinstance(first, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        # The version after the newest has no changes yet.
        if not is_number or not 0 <= first <= self.last + (last is None) or self.last > newest:
            raise TableError(
                f"{self.name}: found changes_since={first!r} and the version {self.last}, expected versions from 0 to "
                f"{newest}, the first before the last"
            )
        with address.errors():
            self.stored = with_plain_types(pa.schema(self._changes(table).schema))

    def parts(self, where: Any) -> list[Part]:
        """Return one part: deltalake reads all changes in one go."""
        return [Part(self._address.path, 1, Format.PARQUET, rows=None)]

    def reader(self, part: Part, selection: Selection, rows_per_batch: int) -> Reader:
        """Return a reader of all changes."""
        return _ChangesReader(self, selection)

    def open_changes(self) -> Any:
        """Return the changes, as a ``pyarrow.RecordBatchReader``."""
        with self._address.errors():
            return self._changes(self._address.load())

    def errors(self) -> AbstractContextManager[None]:
        """Turn the errors of deltalake into a ``TableError``."""
        return self._address.errors()

    def _changes(self, table: Any) -> Any:
        if self._first > self.last:
            found = table.load_cdf(starting_version=self._first, allow_out_of_range=True)
        else:
            found = table.load_cdf(starting_version=self._first, ending_version=self.last)
        return pa.RecordBatchReader.from_stream(found)


@dataclass(frozen=True)
class _ChangesReader(Reader):
    changes: DeltaChanges
    selection: Selection

    def cuts(self) -> list[int]:
        return []

    def batches(self, byte_range: ByteRange, claim: Claim) -> Iterator[pa.RecordBatch]:
        if not claim_whole(byte_range.start, claim):
            return
        loaded = self.selection.loaded
        found = iter(self.changes.open_changes())
        while True:
            with self.changes.errors():
                batch = next(found, None)
            if batch is None:
                return
            yield batch.select(loaded.names).cast(loaded)

    def close(self) -> None:
        pass


def _made_at(table: Any) -> datetime.datetime | None:
    """Return when the loaded version was committed; None if the log does not tell."""
    loaded = table.version()
    milliseconds = next((each.get("timestamp") for each in table.history() if each.get("version") == loaded), None)
    if milliseconds is None:
        return None
    return datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.timezone.utc)


def _bounds(name: str, action: Mapping[str, Any]) -> Bounds:
    most = action.get(f"max.{name}")
    if isinstance(most, datetime.datetime):
        most += _COARSE
    return Bounds(action.get(f"min.{name}"), most, action.get(f"null_count.{name}"))


def _check_features(name: str, table: Any) -> None:
    """Raise if the table has features that decide how its files are read, and that this reader does not know."""
    unknown = features_in_use(table, table.protocol().reader_features) - _READ
    mapping = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        unknown.add("columnMapping")
    if unknown:
        raise TableError(
            f"{name}: found the table features {', '.join(sorted(unknown))}, expected none or some of "
            f"{', '.join(sorted(_READ))}: rows would be wrong",
            fix="write a copy of the table without these features, and read that",
        )


def features_in_use(table: Any, features: Sequence[str] | None) -> set[str]:
    """Return the features that a table needs; deltalake declares variants also where no column has any."""
    found = set(features or ())
    return found if '"variant"' in table.schema().to_json() else found - {"variantType"}


def _deleted(table: Any) -> dict[str, bytes]:
    """Return which rows are kept, of the files with deletion vectors."""
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return {}
    masks: dict[str, bytes] = {}
    for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
        for path, kept in zip(batch.column("filepath").to_pylist(), batch.column("selection_vector"), strict=True):
            local = unquote(path.removeprefix("file://")) if path.startswith("file://") else path
            masks[local] = np.packbits(np.asarray(kept.values)).tobytes()
    return masks


def _appended_after(name: str, old: Any, new: Any) -> set[str]:
    """Return the files of an older version. Raises if a newer one lacks any of them."""
    before = {action["path"] for action in pa.table(old.get_add_actions()).select(["path"]).to_pylist()}
    after = {action["path"] for action in pa.table(new.get_add_actions()).select(["path"]).to_pylist()}
    if gone := before - after:
        raise TableError(
            f"{name}: {len(gone)} files of version {old.version()} are gone in version {new.version()}, expected only "
            "appended rows between them: rows were deleted or updated, or files were compacted",
            fix=Fix("read the changes with changes_since=, if the table records them, or the whole table"),
        )
    return before


def _text(value: Any) -> str:
    """Return a value of a partition as a text that a cast reads."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ")
    return str(value)
