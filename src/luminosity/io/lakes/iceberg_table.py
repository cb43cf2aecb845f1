"""An Iceberg table as it was at one snapshot: its columns, its data files, and how they are read."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from luminosity._shared.text import list_some
from luminosity.errors import Fix, InvalidArgument, TableError
from luminosity.io.formats import Format
from luminosity.io.lakes.columns import with_plain_types
from luminosity.io.lakes.iceberg_catalog import IcebergAddress, iceberg_errors
from luminosity.io.lakes.part_reader import Bounds, PartReader, possible_parts
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.named_table import FollowedTable, NewVersion, Part
from luminosity.io.reading.reader import ByteRange, Claim, Reader, claim_whole
from luminosity.io.reading.selection import Selection

__all__ = ["IcebergTable", "Version"]

Version: TypeAlias = int | str | datetime.datetime | None
"""A version of a table: its number, the name of a tag or branch, a time, or None for the newest."""
_FIELD_ID = b"PARQUET:field_id"
_SHOWN_SNAPSHOTS = 5


class IcebergTable(FollowedTable):
    """A snapshot of an Iceberg table, or the rows that were appended between two snapshots."""

    kind = "ReadIceberg"

    def __init__(self, address: IcebergAddress, at: Version = None, since: Version = None) -> None:
        self.name = str(address)
        self._address = address
        table = address.load()
        self._io, self._metadata = table.io, table.metadata
        with iceberg_errors(self.name):
            last = _snapshot(self.name, table, at)
            self.snapshot_id: int | None = None if last is None else last.snapshot_id
            self._micros = 0 if last is None else last.timestamp_ms * 1000
            self._since = None if since is None else _snapshot(self.name, table, since)
            if self._since is not None:
                _snapshots_after(self.name, table, self._since.snapshot_id, last)
            self._schema = table.schema() if at is None or last is None else _schema_at(table, last)
            self.stored = with_plain_types(self._schema.as_arrow())
            self._tasks: list[Any] | None = None

    def narrow(self, where: Any) -> Any:
        """Plan only the files that an Iceberg condition leaves, and return it as a condition of pyarrow.

        ``where`` is a text such as ``"stars >= 4"``, or an expression of pyiceberg. Partitions of any transform count.
        """
        from pyiceberg.expressions import parser
        from pyiceberg.expressions.visitors import bind
        from pyiceberg.io.pyarrow import expression_to_pyarrow

        try:
            condition = parser.parse(where) if isinstance(where, str) else where
            bound = bind(self._schema, condition, case_sensitive=True)
        except Exception as error:  # The parser and the visitor have their own errors.
            raise TableError(
                f"{self.name}: where={where!r} can't be evaluated on its columns: {error}; it has "
                f"{list_some(self.stored.names, 20)}"
            ) from error
        self._tasks = self._plan(condition)
        return expression_to_pyarrow(bound, self._schema)

    def parts(self, where: Any) -> list[Part]:
        """Return the data files, except those whose statistics exclude the condition."""
        tasks = self._plan(None) if self._tasks is None else self._tasks
        self._tasks = None
        return self._possible(tasks, where)

    def _possible(self, tasks: Sequence[Any], where: Any) -> list[Part]:
        found = [(_part(task), self._bounds(task.file)) for task in tasks]
        return possible_parts(found, self.stored, where)

    def _plan(self, condition: Any) -> list[Any]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.table import DataScan

        if self.snapshot_id is None:
            return []
        rows = AlwaysTrue() if condition is None else condition
        with iceberg_errors(self.name):
            if self._since is None:
                return list(DataScan(self._metadata, self._io, rows, snapshot_id=self.snapshot_id).plan_files())
            return self._appended(self._metadata, rows, self._since.snapshot_id, self.snapshot_id)

    def _appended(self, metadata: Any, rows: Any, since: int | None, last: int) -> list[Any]:
        """Return the files that were appended after a snapshot, or from the first one on, up to another."""
        from pyiceberg.table import IncrementalAppendScan

        if since == last:
            return []  # pyiceberg refuses an empty range of snapshots
        scan = IncrementalAppendScan(metadata, self._io, rows).to_snapshot_id_inclusive(last)
        return list((scan if since is None else scan.from_snapshot_id_exclusive(since)).plan_files())

    def opened(self, parts: list[Part]) -> NewVersion:
        """Return the snapshot that was opened."""
        return NewVersion(self.snapshot_id, self._micros, parts)

    def newer(self, version: int | None, where: Any) -> list[NewVersion]:
        """Return the snapshots after this one. They are read with the columns that the table had when it was opened."""
        from pyiceberg.expressions import AlwaysTrue

        found: list[NewVersion] = []
        with iceberg_errors(self.name):
            table = self._address.load()
            for each in _snapshots_after(self.name, table, version, table.current_snapshot()):
                tasks = self._appended(table.metadata, AlwaysTrue(), each.parent_snapshot_id, each.snapshot_id)
                parts = self._possible(tasks, where)
                found.append(NewVersion(each.snapshot_id, each.timestamp_ms * 1000, parts))
        return found

    def _bounds(self, file: Any) -> Mapping[str, Bounds]:
        from pyiceberg.conversions import from_bytes

        known: dict[str, Bounds] = {}
        for field in self._schema.fields:
            least, most = (file.lower_bounds or {}).get(field.field_id), (file.upper_bounds or {}).get(field.field_id)
            if least is None or most is None or not field.field_type.is_primitive:
                continue
            nulls = (file.null_value_counts or {}).get(field.field_id)
            known[field.name] = Bounds(from_bytes(field.field_type, least), from_bytes(field.field_type, most), nulls)
        return known

    def reader(self, part: Part, selection: Selection, rows_per_batch: int) -> Reader:
        """Open a data file. Files with deletes, or with columns that changed inside, are read by pyiceberg."""
        task = part.detail
        names = None
        if not task.delete_files and task.file.file_format == "PARQUET":
            with self._open(part) as source:
                names = _plain_names(source, self._schema, selection)
        if names is not None:
            return PartReader(part, selection, rows_per_batch, self._open, names)
        return _LibraryReader(self._metadata, self._io, self._schema, task, selection)

    def _open(self, file: TableFile) -> Any:
        opened = self._io.new_input(file.path).open()
        return opened if isinstance(opened, pa.NativeFile) else pa.PythonFile(opened, mode="r")


@dataclass(frozen=True)
class _LibraryReader(Reader):
    """Reads a whole file with pyiceberg, which knows deletes, and columns that were renamed inside others."""

    metadata: Any
    io: Any
    schema: Any
    task: Any
    selection: Selection

    def cuts(self) -> list[int]:
        """Return no cuts."""
        return []

    def batches(self, byte_range: ByteRange, claim: Claim) -> Iterator[pa.RecordBatch]:
        """Yield all rows that are not deleted."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        if not claim_whole(byte_range.start, claim):
            return
        loaded = self.selection.loaded
        scan = ArrowScan(self.metadata, self.io, self.schema.select(*loaded.names), AlwaysTrue())
        for batch in scan.to_record_batches([self.task]):
            yield batch.select(loaded.names).cast(loaded)

    def close(self) -> None:
        """Do nothing: pyiceberg closes the file."""


def _part(task: Any) -> Part:
    file = task.file
    if any(int(delete.content) == 2 for delete in task.delete_files):
        raise TableError(
            f"{file.file_path}: found equality deletes, which pyiceberg can't apply, expected deletes by position",
            fix="rewrite the data files with the engine that deleted the rows (rewrite_data_files), and read again",
        )
    return Part(file.file_path, file.file_size_in_bytes, Format.PARQUET, rows=file.record_count, detail=task)


def _plain_names(source: Any, schema: Any, selection: Selection) -> dict[str, str] | None:
    """Return the file's name of each column, found by its id, or None if only pyiceberg can read the file."""
    from pyarrow import parquet

    found = parquet.read_schema(source)
    by_id = {_id(field): field for field in found}
    if None in by_id:
        return None  # written by another program, which gave no ids
    names: dict[str, str] = {}
    expected = schema.as_arrow()
    for name in selection.loaded.names:
        field = expected.field(name)
        there = by_id.get(_id(field))
        if there is None:
            return None  # it may have a default, or the value of a partition
        if _ids(field) != _ids(there):
            return None
        names[name] = there.name
    return names


def _id(field: pa.Field) -> int | None:
    text = (field.metadata or {}).get(_FIELD_ID)
    return None if text is None else int(text)


def _ids(field: pa.Field) -> Any:
    """Return the ids and names of what is inside a column: they must be the same for Arrow to read it."""
    kind = field.type
    if pa.types.is_map(kind):
        return [_ids(kind.key_field), _ids(kind.item_field)]
    if pa.types.is_struct(kind):
        inner = [kind.field(at) for at in range(kind.num_fields)]
        return [(each.name, _id(each), _ids(each)) for each in inner]
    return [(_id(kind.value_field), _ids(kind.value_field))] if pa.types.is_nested(kind) else []


def _snapshot(name: str, table: Any, at: Any) -> Any:
    if at is None:
        return table.current_snapshot()
    if isinstance(at, bool) or not isinstance(at, int | str | datetime.datetime):
        raise InvalidArgument(f"{name}: found the version {at!r}, expected a snapshot's id, a tag or branch, or a time")
    if isinstance(at, int):
        found = table.snapshot_by_id(at)
    elif isinstance(at, str):
        found = table.snapshot_by_name(at)
    else:
        found = table.snapshot_as_of_timestamp(int(at.timestamp() * 1000))
    if found is not None:
        return found
    newest = [f"{each.snapshot_id} ({_time(each.timestamp_ms)})" for each in reversed(table.snapshots())]
    tags = [each for each in table.refs() if each != "main"]
    has = list_some(newest, _SHOWN_SNAPSHOTS) if newest else "none"
    raise TableError(
        f"{name}: no snapshot {at!r}; its snapshots are {has}"
        + (f"; its names are {list_some(tags, 20)}" if tags else ""),
    )


def _time(milliseconds: int) -> str:
    return datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.timezone.utc).isoformat(timespec="seconds")


def _schema_at(table: Any, snapshot: Any) -> Any:
    """Return the columns that the table had at a snapshot."""
    return next((each for each in table.schemas().values() if each.schema_id == snapshot.schema_id), table.schema())


def _snapshots_after(name: str, table: Any, since: int | None, last: Any) -> list[Any]:
    """Return the snapshots after ``since``, the oldest first. Raises unless all of them only appended rows."""
    found: list[Any] = []
    at = last
    while at is not None and at.snapshot_id != since:
        operation = at.summary.operation.value if at.summary is not None else "unknown"
        if operation not in ("append", "replace"):
            after = "" if since is None else f" after snapshot {since}"
            raise TableError(
                f"{name}: snapshot {at.snapshot_id} is of the kind {operation!r}, expected only appended rows{after}",
                fix=Fix("read the whole table, or only the snapshots before or after it with since= and snapshot="),
            )
        found.append(at)
        at = None if at.parent_snapshot_id is None else table.snapshot_by_id(at.parent_snapshot_id)
    is_whole = found and found[-1].parent_snapshot_id is None
    if at is None and (since is not None or (found and not is_whole)):
        wanted = "the first snapshot" if since is None else f"snapshot {since}"
        raise TableError(f"{name}: {wanted} is not among the ancestors of the one to read: it expired, or was undone")
    return found[::-1]
