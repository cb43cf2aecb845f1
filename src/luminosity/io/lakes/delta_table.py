"""A Delta table at one version: its columns, its data files, how they are read, and the changes between versions."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from luminosity.errors import Fix, TableError
from luminosity.io.formats import Format
from luminosity.io.lakes.columns import with_plain_types
from luminosity.io.lakes.delta_log import Added, DeltaAddress, appended_by, made_at
from luminosity.io.lakes.part_reader import Bounds, PartReader, possible_parts
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.named_table import FollowedTable, NamedTable, NewVersion, Part
from luminosity.io.reading.reader import ByteRange, Claim, Reader, claim_whole
from luminosity.io.reading.selection import Selection

__all__ = ["DeltaChanges", "DeltaTable", "features_in_use"]

_READ = frozenset({"timestampNtz", "deletionVectors", "v2Checkpoint", "vacuumProtocolCheck"})
"""The features of tables that this reader knows."""
_COARSE = datetime.timedelta(milliseconds=1)  # to which some writers cut times in statistics


@dataclass(frozen=True)
class _File:
    """What the log says about a data file."""

    path: str
    size: int
    rows: int | None
    values: Mapping[str, Any]  # of its partition
    bounds: Mapping[str, Bounds]


class DeltaTable(FollowedTable):
    """A version of a Delta table, or the rows that were appended after another version."""

    kind = "ReadDelta"

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
        files = [
            _File(
                self._address.join(action["path"]),
                action["size_bytes"],
                action["num_records"],
                {name: action[f"partition.{name}"] for name in self.partition.names},
                {name: _bounds(name, action) for name in self.stored.names},
            )
            for action in actions
            if action["path"] not in self._old
        ]
        return self._possible(files, deleted, where)

    def opened(self, parts: list[Part]) -> NewVersion:
        """Return the version that was opened."""
        made = made_at(self._address.load(self.version))
        return NewVersion(self.version, 0 if made is None else int(made.timestamp() * 1e6), parts)

    def newer(self, version: int | None, where: Any) -> list[NewVersion]:
        """Return the versions after this one. They are read with the columns that the table had when it was opened."""
        table = self._address.load()
        _check_features(self.name, table)
        after = self.version if version is None else version
        added = [appended_by(self._address, each) for each in range(after + 1, table.version() + 1)]
        return [NewVersion(each.version, each.micros, self._possible(self._files(each), {}, where)) for each in added]

    def _files(self, added: Added) -> list[_File]:
        found: list[_File] = []
        for each in added.files:
            stats = json.loads(each.get("stats") or "{}")
            texts = each["partitionValues"]
            values = {
                field.name: pa.scalar(texts.get(field.name) or None, pa.string()).cast(field.type).as_py()
                for field in self.partition
            }
            path = self._address.join(each["path"])
            found.append(_File(path, each["size"], stats.get("numRecords"), values, {}))
        return found

    def _possible(self, files: Sequence[_File], deleted: Mapping[str, bytes], where: Any) -> list[Part]:
        found = [self._part(file, deleted.get(file.path)) for file in files]
        return possible_parts(found, self._whole, where)

    def _part(self, file: _File, kept: bytes | None) -> tuple[Part, Mapping[str, Bounds]]:
        texts = tuple((name, None if value is None else _text(value)) for name, value in file.values.items())
        known = {name: Bounds(value, value, 0) for name, value in file.values.items() if value is not None}
        rows = self._count(file.path) if file.rows is None else file.rows
        if kept is not None:
            rows = int(np.unpackbits(np.frombuffer(kept, np.uint8)).sum())
        part = Part(file.path, file.size, Format.PARQUET, None, texts, rows=rows, detail=kept)
        return part, {**file.bounds, **known}

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
