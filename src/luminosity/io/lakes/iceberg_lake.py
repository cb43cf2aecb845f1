"""Writes Iceberg tables: their data files with ids, partitions and statistics, and the snapshot that adds them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from luminosity._shared.text import list_some
from luminosity.errors import WriteError
from luminosity.io.lakes.columns import plain_type
from luminosity.io.lakes.contract import CommitNote, Conflict, DataFile, Lake, Layout, Mode, NewTable
from luminosity.io.lakes.iceberg_catalog import IcebergAddress, iceberg_errors
from luminosity.io.lakes.iceberg_partitions import check_spec, partition_fields, values_of
from luminosity.io.writing.write_step import groups

__all__ = ["IcebergLake"]

_CODEC = "write.parquet.compression-codec"
_FORMAT = "write.format.default"
_SHOWN_COLUMNS = 20


class IcebergLayout(Layout):
    """The data files of an Iceberg table. Columns have ids, and partitions may be of any transform."""

    def __init__(self, name: str, table: Any) -> None:
        self.name = name
        self._metadata, self._io = table.metadata, table.io
        self._spec = table.spec()
        self.schema = pa.schema([_small(field) for field in table.schema().as_arrow()])
        self.compression = table.metadata.properties.get(_CODEC)

    def split(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, pa.RecordBatch]]:
        """Yield the rows of each combination of the transforms' values."""
        if self._spec.is_unpartitioned():
            yield None, batch
            return
        found = list(groups(values_of(batch, self._spec, self._metadata.schema())))
        for values, rows in found:
            # Copy the rows: a view would keep the whole batch in memory while they wait.
            yield values, batch.take(rows) if len(found) > 1 else batch

    def new_path(self, partition: Any, name: str) -> str:
        """Return a path below the folder that the table's properties name."""
        from pyiceberg.table.locations import load_location_provider

        locations = load_location_provider(self._metadata.location, self._metadata.properties)
        return locations.new_data_location(name, None if partition is None else self._key(partition))

    def staged_path(self, name: str) -> str:
        """Return a path beside the data."""
        return f"{self._metadata.location.rstrip('/')}/luminosity-staged/{name}"

    def open_output(self, path: str) -> Any:
        """Open a new file."""
        if (local := self.local(path)) is not None:
            os.makedirs(os.path.dirname(local), exist_ok=True)
        return self._io.new_output(path).create()

    def open_input(self, path: str) -> Any:
        """Open a file for reading."""
        opened = self._io.new_input(path).open()
        return opened if isinstance(opened, pa.NativeFile) else pa.PythonFile(opened, mode="r")

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""
        try:
            self._io.delete(path)
        except FileNotFoundError:
            return

    def describe(self, path: str, partition: Any, metadata: Any, size: int) -> Any:
        """Return pyiceberg's description, with counts and bounds of the columns."""
        from pyiceberg.io.pyarrow import (
            compute_statistics_plan,
            data_file_statistics_from_parquet_metadata,
            parquet_path_to_id_mapping,
        )
        from pyiceberg.manifest import DataFile as IcebergFile
        from pyiceberg.manifest import DataFileContent, FileFormat
        from pyiceberg.typedef import Record

        schema = self._metadata.schema()
        statistics = data_file_statistics_from_parquet_metadata(
            metadata, compute_statistics_plan(schema, self._metadata.properties), parquet_path_to_id_mapping(schema)
        )
        found = IcebergFile.from_args(
            content=DataFileContent.DATA,
            file_path=path,
            file_format=FileFormat.PARQUET,
            partition=Record() if partition is None else self._key(partition).partition,
            file_size_in_bytes=size,
            **statistics.to_serialized_dict(),
        )
        found.spec_id = self._spec.spec_id  # no part of the record
        return found

    def _key(self, values: Any) -> Any:
        from pyiceberg.partitioning import PartitionFieldValue, PartitionKey

        fields = [PartitionFieldValue(field, value) for field, value in zip(self._spec.fields, values, strict=True)]
        return PartitionKey(fields, self._spec, self._metadata.schema())


class IcebergLake(Lake):
    """An Iceberg table in a catalog."""

    kind = "WriteIceberg"

    def __init__(self, address: IcebergAddress) -> None:
        self.name = str(address)
        self._address = address

    def schema(self) -> pa.Schema | None:
        """Return the columns of the table, or None if it does not exist."""
        table = self._address.find()
        return None if table is None else pa.schema([_small(field) for field in table.schema().as_arrow()])

    def check(self, mode: Mode) -> None:
        """Raise if the table can't be written, or its namespace does not exist."""
        table = self._address.find()
        if table is None:
            self._check_namespace()
            return
        if (form := table.metadata.properties.get(_FORMAT, "parquet")) != "parquet":
            raise WriteError(f"{self.name}: found the table property {_FORMAT}={form}, expected parquet")
        check_spec(self.name, table.spec(), table.schema())

    def check_new(self, new: NewTable) -> None:
        """Raise unless each partition is a column, or a transform of one that its type allows."""
        partition_fields(self.name, new.partition_by, new.schema)

    def _check_namespace(self) -> None:
        space, _, _ = self._address.table.rpartition(".")
        with iceberg_errors(self.name):
            catalog = self._address.load_catalog()
            if not catalog.namespace_exists(space):
                there = [".".join(found) for found in catalog.list_namespaces()]
                raise WriteError(
                    f"{self.name}: no namespace {space!r}; the catalog has "
                    f"{list_some(there, _SHOWN_COLUMNS) if there else 'none'}",
                    fix=f"create it: load_catalog({self._address.catalog!r}).create_namespace({space!r})",
                )

    def has_rows(self) -> bool:
        """Return whether the table exists and its newest snapshot has data files."""
        table = self._address.find()
        if table is None or table.current_snapshot() is None:
            return False
        return any(True for _ in table.scan().plan_files())

    def create(self, new: NewTable) -> None:
        """Make the table, with its partitions, in one step."""
        from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError

        if self._address.find() is not None:
            return
        parts = partition_fields(self.name, new.partition_by, new.schema)
        with iceberg_errors(self.name):
            try:
                catalog = self._address.load_catalog()
                made = catalog.create_table_transaction(
                    self._address.table, new.schema, properties=dict(new.properties)
                )
                with made as transaction, transaction.update_spec() as spec:
                    for column, transform, name in parts:
                        spec.add_field(column, transform, name)
            except (TableAlreadyExistsError, CommitFailedException):
                if self._address.find() is None:  # Otherwise another process was first.
                    raise

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Add columns at the end. All may have nulls."""
        from pyiceberg.exceptions import CommitFailedException

        table = self._address.load()
        there = {field.name for field in table.schema().fields}
        added = [field for field in fields if field.name not in there]
        if not added:
            return
        try:
            with table.update_schema() as update:
                update.union_by_name(pa.schema(added))
        except CommitFailedException as error:
            raise Conflict(str(error)) from error

    def layout(self) -> Layout:
        """Return how the files of the table are written."""
        return IcebergLayout(self.name, self._address.load())

    def version(self) -> int | None:
        """Return the newest snapshot's id."""
        table = self._address.find()
        snapshot = None if table is None else table.current_snapshot()
        return None if snapshot is None else snapshot.snapshot_id

    def committed(self, note: CommitNote) -> int | None:
        """Return the snapshot whose summary has the note."""
        return _committed(self._address.load(), note)

    def commit(self, files: Sequence[DataFile], note: CommitNote, *, replace: bool) -> int:
        """Commit one snapshot."""
        table = self._at_once()
        for file in files:
            if file.detail.spec_id != table.spec().spec_id:
                raise WriteError(
                    f"{self.name}: the partitions of the table were changed while the rows were written, expected the "
                    "same until the commit",
                    fix="start the run again, with a new checkpoint folder if it has one",
                )
        old = [task.file for task in table.scan().plan_files()] if replace else []
        transaction = table.transaction()
        update = transaction.update_snapshot(note.properties())
        with update.overwrite() if old else update.fast_append() as snapshot:
            for each in old:
                snapshot.delete_data_file(each)
            for file in files:
                snapshot.append_data_file(file.detail)
        return self._commit(transaction, note)

    def upsert(self, rows: pa.RecordBatchReader, keys: Sequence[str], note: CommitNote) -> int:
        """Commit the rows, all of which are held in memory, with those of the table that they may replace."""
        table = self._at_once()
        transaction = table.transaction()
        with iceberg_errors(self.name):
            if len(keys) == 1:
                transaction.upsert(rows.read_all(), list(keys), snapshot_properties=note.properties())
            else:
                _upsert_by_several(table, transaction, rows.read_all(), keys, note)
        return self._commit(transaction, note)

    def _at_once(self) -> Any:
        """Return the table such that a commit is tried once: before another attempt, the note must be looked for."""
        from pyiceberg.table import TableProperties

        table = self._address.load()
        properties = {**table.metadata.properties, TableProperties.COMMIT_NUM_RETRIES: "0"}
        table.metadata = table.metadata.model_copy(update={"properties": properties})
        return table

    def _commit(self, transaction: Any, note: CommitNote) -> int:
        from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, ValidationException

        with iceberg_errors(self.name):
            try:
                transaction.commit_transaction()
            except (CommitFailedException, CommitStateUnknownException, ValidationException) as error:
                raise Conflict(str(error)) from error
            table = self._address.load()
        found = _committed(table, note)
        return found if found is not None else (self.version() or 0)


def _committed(table: Any, note: CommitNote) -> int | None:
    expected = note.properties().items()
    for snapshot in reversed(table.snapshots()):
        summary = snapshot.summary
        if summary is not None and expected <= summary.additional_properties.items():
            return snapshot.snapshot_id
    return None


def _upsert_by_several(table: Any, transaction: Any, rows: pa.Table, keys: Sequence[str], note: CommitNote) -> None:
    """Replace rows by several keys. pyiceberg would look for each row by itself: some hundredths of a second for each.

    Rows that have one of the values in each key are read, and those among them whose keys are not given written again.
    """
    from pyiceberg import expressions

    library: Any = expressions  # The arguments of its classes are not annotated.
    one_of = library.And(*(library.In(key, rows.column(key).unique().to_pylist()) for key in keys))
    there = table.scan(row_filter=one_of).to_arrow().cast(rows.schema)
    numbered = there.select(list(keys)).append_column("", pa.array(np.arange(there.num_rows)))
    others = numbered.join(rows.select(list(keys)), list(keys), join_type="left anti").column("")
    if there.num_rows == 0:
        transaction.append(rows, snapshot_properties=note.properties())
    else:
        whole = pa.concat_tables([there.take(others), rows])
        transaction.overwrite(whole, overwrite_filter=one_of, snapshot_properties=note.properties())


def _small(field: pa.Field) -> pa.Field:
    """Return the column with the ids that it has, and 32-bit offsets."""
    kind = field.type
    if pa.types.is_map(kind):
        kind = pa.map_(_small(kind.key_field), _small(kind.item_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_small(kind.field(at)) for at in range(kind.num_fields)])
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = pa.list_(_small(kind.value_field))
    elif not isinstance(kind, pa.BaseExtensionType):
        kind = plain_type(kind)
    return pa.field(field.name, kind, field.nullable, field.metadata)
