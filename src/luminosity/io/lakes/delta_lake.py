"""Writes Delta tables: their data files with statistics, and the version that adds them, once for each transaction."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from luminosity.errors import Fix, InvalidArgument, WriteError
from luminosity.io.folders import why_not_writable
from luminosity.io.lakes.columns import with_plain_types
from luminosity.io.lakes.contract import CommitNote, Conflict, DataFile, Lake, Layout, Mode, NewTable
from luminosity.io.lakes.delta_log import DeltaAddress
from luminosity.io.lakes.delta_table import features_in_use
from luminosity.io.writing.write_step import NULL_FOLDER, partitioned

__all__ = ["DeltaLake"]

_WRITTEN = frozenset(
    {"appendOnly", "timestampNtz", "changeDataFeed", "deletionVectors", "v2Checkpoint", "vacuumProtocolCheck"}
    | {"invariants", "checkConstraints", "generatedColumns"}
)
"""The features of tables with which rows are written correctly: the last three only if no column uses them."""
_CHECKED = ("delta.invariants", "delta.generationExpression", "delta.identity.start")
_TEXT_BOUND = 32  # characters: longer texts have no bounds in the statistics
_ATTEMPTS = 0  # of deltalake itself: before another one, the transaction must be looked for


class DeltaLayout(Layout):
    """The data files of a Delta table: the columns of partitions are in the names of folders only."""

    def __init__(self, address: DeltaAddress, table: Any) -> None:
        self.name = str(address)
        self._address = address
        self._by: list[str] = table.metadata().partition_columns
        whole = pa.schema(table.schema().to_arrow())
        plain = with_plain_types(whole)
        self.schema = pa.schema([plain.field(field.name).with_nullable(field.nullable) for field in whole])

    def split(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, pa.RecordBatch]]:
        """Yield the rows of each partition, with its folder and its values as texts."""
        if not self._by:
            yield None, batch
            return
        for name in self._by:
            column = batch.column(name)
            if pa.types.is_string(column.type) and pa.scalar("") in column:
                raise WriteError(
                    f"{self.name}: found an empty text in {name!r}, which Delta can't tell from null in a partition",
                    fix=Fix("make it null or another text with MapTable, or write a table without these partitions"),
                )
        yield from partitioned(batch, self._by)

    def new_path(self, partition: Any, name: str) -> str:
        """Return a path in the folder of the partition."""
        return f"{self._address.path.rstrip('/')}/{f'{partition}/' if partition else ''}{name}"

    def staged_path(self, name: str) -> str:
        """Return a path that readers and ``vacuum`` ignore."""
        return f"{self._address.path.rstrip('/')}/_luminosity-staged/{name}"

    def open_output(self, path: str) -> Any:
        """Open a new file."""
        if "://" not in path:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return pa.OSFile(path, mode="wb")
        system, name = self._system(path)
        return system.open_output_stream(name)

    def open_input(self, path: str) -> Any:
        """Open a file for reading."""
        return self._address.open_file(path)

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""
        try:
            if "://" not in path:
                os.remove(path)
            else:
                system, name = self._system(path)
                system.delete_file(name)
        except FileNotFoundError:
            return

    def _system(self, path: str) -> tuple[Any, str]:
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        root = self._address.path.rstrip("/")
        return PyFileSystem(DeltaStorageHandler(root, dict(self._address.options) or None)), path[len(root) + 1 :]

    def describe(self, path: str, partition: Any, metadata: Any, size: int) -> Any:
        """Return the folder and the statistics, as the log has them."""
        return {"folder": partition or "", "stats": json.dumps(_statistics(metadata))}


class DeltaLake(Lake):
    """A Delta table in a folder."""

    kind = "WriteDelta"

    def __init__(self, address: DeltaAddress) -> None:
        self.name = str(address)
        self._address = address

    def schema(self) -> pa.Schema | None:
        """Return the columns of the table, or None if it does not exist."""
        table = self._address.find()
        return None if table is None else DeltaLayout(self._address, table).schema

    def check(self, mode: Mode) -> None:
        """Raise if the table has rules for rows, which only other programs apply, or this user may not write it."""
        if self._address.is_local and (reason := why_not_writable(self._address.path)):
            raise WriteError(f"{self.name}: {reason}", fix="choose another folder, or change its owner or mode")
        table = self._address.find()
        if table is None:
            if self._address.is_local and os.path.isdir(self._address.path) and os.listdir(self._address.path):
                raise WriteError(
                    f"{self.name}: found a folder with files that is no Delta table, expected a table or no folder",
                    fix="choose another folder, or convert it with deltalake.convert_to_deltalake",
                )
            return
        settings = table.metadata().configuration
        rules = [key for key in settings if key.startswith("delta.constraints.")]
        text = table.schema().to_json()
        rules += [key for key in _CHECKED if key in text]
        unknown = features_in_use(table, table.protocol().writer_features) - _WRITTEN
        if settings.get("delta.columnMapping.mode", "none") != "none":
            unknown.add("columnMapping")
        if rules or unknown:
            raise WriteError(
                f"{self.name}: found {', '.join(sorted([*rules, *unknown]))}, expected a table without rules for its "
                "rows, and without features that are not known here: rows could break them",
                fix="write to another table, and let the engine that made this one merge it",
            )
        layout = DeltaLayout(self._address, table)
        for name in table.metadata().partition_columns:
            _check_partition(self.name, layout.schema.field(name))
        if mode in ("overwrite", "upsert") and settings.get("delta.appendOnly") == "true":
            raise WriteError(f"{self.name}: found delta.appendOnly=true, expected false for mode={mode!r}")

    def check_new(self, new: NewTable) -> None:
        """Raise unless the partitions are columns whose values fit into names of folders, and others are left."""
        for name in new.partition_by:
            if name not in new.schema.names:
                raise InvalidArgument(
                    f"{self.name}: found partition_by={name!r}, expected one of {', '.join(new.schema.names)}"
                )
            _check_partition(self.name, new.schema.field(name))
        if set(new.partition_by) == set(new.schema.names):
            raise InvalidArgument(
                f"{self.name}: found partition_by={list(new.partition_by)}, which are all columns, expected one more: "
                "files do not have the columns of partitions"
            )

    def has_rows(self) -> bool:
        """Return whether the table exists and has data files."""
        table = self._address.find()
        return table is not None and bool(table.file_uris())

    def create(self, new: NewTable) -> None:
        """Make the table unless it exists."""
        from deltalake import DeltaTable
        from deltalake.exceptions import CommitFailedError

        self.check_new(new)
        with self._address.errors():
            try:
                DeltaTable.create(
                    self._address.path,
                    new.schema,
                    mode="ignore",
                    partition_by=list(new.partition_by) or None,
                    configuration=dict(new.properties) or None,
                    storage_options=dict(self._address.options) or None,
                )
            except CommitFailedError:
                if self._address.find() is None:  # Otherwise another process was first.
                    raise

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Add columns at the end. All may have nulls."""
        from deltalake import Schema
        from deltalake.exceptions import CommitFailedError

        table = self._address.load()
        there = DeltaLayout(self._address, table).schema.names
        added = [field.with_nullable(True) for field in fields if field.name not in there]
        if not added:
            return
        with self._address.errors():
            try:
                table.alter.add_columns(Schema.from_arrow(pa.schema(added)).fields)
            except CommitFailedError as error:
                raise Conflict(str(error)) from error

    def layout(self) -> Layout:
        """Return how the files of the table are written."""
        return DeltaLayout(self._address, self._address.load())

    def version(self) -> int | None:
        """Return the newest version."""
        table = self._address.find()
        return None if table is None else table.version()

    def committed(self, note: CommitNote) -> int | None:
        """Return the newest version, if the run's transaction has come as far as this commit."""
        table = self._address.load()
        last = table.transaction_version(_application(note))
        return table.version() if last is not None and last >= note.number else None

    def commit(self, files: Sequence[DataFile], note: CommitNote, *, replace: bool) -> int:
        """Commit one version with the run's transaction."""
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction

        table = self._address.load()
        root = self._address.path.rstrip("/")
        by: list[str] = table.metadata().partition_columns
        actions = [
            AddAction(
                path=file.path[len(root) + 1 :],  # deltalake quotes it in the log
                size=file.size,
                partition_values=_values(file.detail["folder"]),
                modification_time=int(time.time() * 1000),
                data_change=True,
                stats=file.detail["stats"],
            )
            for file in files
        ]
        for action in actions:
            if list(action.partition_values) != by:
                raise WriteError(
                    f"{self.name}: the partitions of the table were changed while the rows were written, expected the "
                    "same until the commit",
                    fix="start the run again, with a new checkpoint folder if it has one",
                )
        with self._address.errors():
            try:
                table.create_write_transaction(
                    actions,
                    "overwrite" if replace else "append",
                    table.schema(),
                    partition_by=by,
                    commit_properties=_properties(note),
                )
            except CommitFailedError as error:
                raise Conflict(str(error)) from error
        return self.version() or 0

    def upsert(self, rows: pa.RecordBatchReader, keys: Sequence[str], note: CommitNote) -> int:
        """Commit one version with deltalake's merge."""
        from deltalake.exceptions import CommitFailedError

        same = " AND ".join(f"there.{_column(key)} = new.{_column(key)}" for key in keys)
        with self._address.errors():
            merge = self._address.load().merge(
                rows, same, source_alias="new", target_alias="there", commit_properties=_properties(note)
            )
            try:
                merge.when_matched_update_all().when_not_matched_insert_all().execute()
            except CommitFailedError as error:
                raise Conflict(str(error)) from error
        return self.version() or 0


def _check_partition(name: str, field: pa.Field) -> None:
    if pa.types.is_nested(field.type) or pa.types.is_binary(field.type):
        raise WriteError(
            f"{name}: found the partition {field.name!r} of {field.type}, expected texts, numbers, times or booleans"
        )


def _properties(note: CommitNote) -> Any:
    from deltalake import CommitProperties, Transaction

    return CommitProperties(note.properties(), _ATTEMPTS, [Transaction(_application(note), note.number)])


def _application(note: CommitNote) -> str:
    return f"luminosity-{note.run}"


def _column(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _values(folder: str) -> dict[str, str | None]:
    """Return the values that the folders of a file name, as texts."""
    found = [part.partition("=") for part in folder.split("/") if part]
    return {unquote(name): None if value == NULL_FOLDER else unquote(value) for name, _, value in found}


def _statistics(metadata: Any) -> dict[str, Any]:
    """Return what readers need to leave out the file: counts, and those bounds that hold for all values."""
    rows = int(metadata.num_rows)
    nulls: dict[str, int] = {}
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    for at in range(metadata.num_columns):
        chunks = [metadata.row_group(group).column(at) for group in range(metadata.num_row_groups)]
        name = metadata.schema.column(at).path
        if "." in name or not chunks or not all(chunk.is_stats_set for chunk in chunks):
            continue
        found = [chunk.statistics for chunk in chunks]
        if all(each.has_null_count for each in found):
            nulls[name] = sum(each.null_count for each in found)
        with_values = [each for each in found if each.has_min_max]
        if len(with_values) < len([each for each in found if each.num_values]) or not with_values:
            continue
        bounds = [min(each.min for each in with_values), max(each.max for each in with_values)]
        if all(isinstance(bound, int) and not isinstance(bound, bool) for bound in bounds) or all(
            isinstance(bound, str) and len(bound) <= _TEXT_BOUND for bound in bounds
        ):
            least[name], most[name] = bounds
        elif all(type(bound) is datetime.date for bound in bounds):
            least[name], most[name] = (bound.isoformat() for bound in bounds)
    return {"numRecords": rows, "minValues": least, "maxValues": most, "nullCount": nulls}
