"""The transforms that read Iceberg and Delta tables at a version, or what came after one, without Java."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import apache_beam as beam

from luminosity.errors import InvalidArgument
from luminosity.io.lakes.delta_log import DeltaAddress
from luminosity.io.lakes.delta_table import DeltaChanges, DeltaTable
from luminosity.io.lakes.iceberg_catalog import IcebergAddress
from luminosity.io.lakes.iceberg_table import IcebergTable, Version
from luminosity.io.read_table import ReadTable
from luminosity.io.reading.follow import FollowVersions
from luminosity.io.reading.named_table import FollowedTable, NamedTable, NewVersion, Part
from luminosity.io.reading.reader import BATCH_ROWS

__all__ = ["ReadDelta", "ReadIceberg"]


class _ReadNamed(ReadTable):
    """What both have in common: everything after the table is found is as ``ReadTable`` does it."""

    def __init__(
        self,
        table: NamedTable,
        columns: Sequence[str] | None,
        where: Any,
        rows_per_batch: int,
        poll_s: float | None = None,
    ) -> None:
        beam.PTransform.__init__(self)  # pyright: ignore[reportUnknownMemberType]
        if rows_per_batch < 1:
            raise InvalidArgument(f"found rows_per_batch={rows_per_batch}, expected 1 or more")
        if poll_s is not None and poll_s <= 0:
            raise InvalidArgument(f"found poll_s={poll_s}, expected seconds, more than 0")
        self._patterns = [table.name]
        self._unreadable = []
        self._doubts = []
        self._open_named(table, columns, where, rows_per_batch)
        self._poll_s = poll_s
        self._where = where

    def _emit_files(self, pipeline: Any) -> Any:
        """Emit the parts of the table, and, if it is followed, those of each new version."""
        table = self._settings.table
        if self._poll_s is None or not isinstance(table, FollowedTable):
            return super()._emit_files(pipeline)
        opened = table.opened([part for part in self._files if isinstance(part, Part)])
        begin = pipeline | "Opened" >> beam.Create([opened], reshuffle=False).with_output_types(NewVersion)
        follow = beam.ParDo(FollowVersions(table, self._where, self._poll_s))
        return begin | "Follow" >> follow.with_output_types(Part)


class ReadIceberg(_ReadNamed):
    """Reads an Iceberg table into ``pyarrow.RecordBatch`` elements, without Java.

    The table is opened, and its columns checked, when the transform is made. Row groups are pieces of work. Deleted
    rows are left out.

    >>> import pyarrow as pa, tempfile
    >>> from pyiceberg.catalog import load_catalog
    >>> folder = tempfile.mkdtemp()
    >>> settings = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": folder}
    >>> catalog = load_catalog("main", **settings)
    >>> catalog.create_namespace("shop")
    >>> rows = pa.table({"text": ["fine", "poor"], "stars": [4, 1]})
    >>> catalog.create_table("shop.reviews", rows.schema).append(rows)
    >>> with beam.Pipeline("FnApiRunner") as pipeline:
    ...     table = pipeline | ReadIceberg("main.shop.reviews", ["text"], "stars > 2", catalog=settings)
    ...     _ = table | beam.Map(lambda batch: print(batch.to_pylist()))
    [{'text': 'fine'}]

    Args:
      table: ``CATALOG.NAMESPACE.TABLE``.
      columns: the columns to read; None reads all.
      where: a condition on rows: a text in the language of Iceberg, such as ``"stars >= 4 and lang = 'en'"``, an
        expression of pyiceberg, or one of pyarrow. Files and row groups whose statistics exclude it are not read; the
        first two also leave out partitions of transforms, such as days and buckets.
      catalog: the properties of the catalog, as pyiceberg takes them. None takes those that ``~/.pyiceberg.yaml`` or
        the environment (``PYICEBERG_CATALOG__NAME__URI``) has for it.
      snapshot: the id of a snapshot, the name of a tag or branch, or a time: the table as it was then. None reads the
        newest, as it is when the transform is made.
      since: a snapshot, like ``snapshot``: only rows that were appended after it are read. If rows were overwritten or
        deleted since, that is an error.
      poll_s: how often to look for new snapshots, in seconds: then the read is a stream without an end. It begins with
        the rows that it would read otherwise, and goes on with those that each new snapshot appends, whose time is that
        of its commit. None reads a table that ends.
      rows_per_batch: the most rows of a batch.
    """

    def __init__(
        self,
        table: str,
        columns: Sequence[str] | None = None,
        where: Any = None,
        *,
        catalog: Mapping[str, str] | None = None,
        snapshot: Version = None,
        since: Version = None,
        poll_s: float | None = None,
        rows_per_batch: int = BATCH_ROWS,
    ) -> None:
        found = IcebergTable(IcebergAddress.of(table, catalog), snapshot, since)
        if where is not None and not type(where).__module__.startswith("pyarrow"):
            where = found.narrow(where)
        self._snapshot_id = found.snapshot_id
        super().__init__(found, columns, where, rows_per_batch, poll_s)

    @property
    def snapshot_id(self) -> int | None:
        """The snapshot that is read, to pass it as ``since=`` next time. None if the table has none."""
        return self._snapshot_id


class ReadDelta(_ReadNamed):
    """Reads a Delta table into ``pyarrow.RecordBatch`` elements, without Java.

    The table is opened, and its columns checked, when the transform is made. Row groups are pieces of work. Deleted
    rows are left out.

    >>> import pyarrow as pa, tempfile
    >>> from deltalake import write_deltalake
    >>> folder = tempfile.mkdtemp()
    >>> write_deltalake(folder, pa.table({"text": ["fine", "poor"], "stars": [4, 1]}))
    >>> import pyarrow.compute as pc
    >>> with beam.Pipeline("FnApiRunner") as pipeline:
    ...     table = pipeline | ReadDelta(folder, ["text"], pc.field("stars") > 2)
    ...     _ = table | beam.Map(lambda batch: print(batch.to_pylist()))
    [{'text': 'fine'}]

    Args:
      path: the folder of the table, or its address on a store that deltalake knows.
      columns: the columns to read; None reads all.
      where: a condition on rows, such as ``pyarrow.compute.field("stars") >= 4``. Partitions, files and row groups
        that can't have such rows are not read.
      storage_options: credentials and settings of the store, as deltalake takes them.
      version: a number or a time: the table as it was then. None reads the newest, as it is when the transform is made.
      since: a version: only rows that were appended after it are read. If files of it are gone, that is an error.
      changes_since: a version: reads what was inserted, updated and deleted from it on, as the table recorded it, with
        the columns ``_change_type``, ``_commit_version`` and ``_commit_timestamp``. One worker reads all of it.
      poll_s: how often to look for new versions, in seconds: then the read is a stream without an end. It begins with
        the rows that it would read otherwise, and goes on with those that each new version appends, whose time is that
        of its commit. None reads a table that ends.
      rows_per_batch: the most rows of a batch.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        where: Any = None,
        *,
        storage_options: Mapping[str, str] | None = None,
        version: Version = None,
        since: Version = None,
        changes_since: int | None = None,
        poll_s: float | None = None,
        rows_per_batch: int = BATCH_ROWS,
    ) -> None:
        address = DeltaAddress.of(os.fspath(path), storage_options)
        if changes_since is not None and since is not None:
            raise InvalidArgument(f"{address}: found since= and changes_since=, expected one of them")
        if changes_since is not None and poll_s is not None:
            raise InvalidArgument(f"{address}: found changes_since= and poll_s=, expected one: changes have an end")
        table: NamedTable
        if changes_since is not None:
            if version is not None and not isinstance(version, int):
                raise InvalidArgument(f"{address}: found version={version!r}, expected a number with changes_since=")
            table = changes = DeltaChanges(address, changes_since, version)
            self._version = changes.last
        else:
            table = read = DeltaTable(address, version, since)
            self._version = read.version
        super().__init__(table, columns, where, rows_per_batch, poll_s)

    @property
    def version(self) -> int:
        """The version that is read, to pass it as ``since=`` next time."""
        return self._version
