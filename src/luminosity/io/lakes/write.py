"""The transforms that write Iceberg and Delta tables without Java: files in workers, one commit by one owner."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import apache_beam as beam
import pyarrow as pa
from apache_beam.pvalue import AsList, AsSingleton
from apache_beam.transforms.window import GlobalWindows

from luminosity.core import WRITES, WRITES_A_FILE_PER_BUNDLE
from luminosity.errors import Fix, InvalidArgument, WriteError
from luminosity.io.lakes.by_name import kind_of, version_of
from luminosity.io.lakes.columns import check_fits, check_keys, storable
from luminosity.io.lakes.commit import (
    CommitOnce,
    CommitPanesInOrder,
    Committed,
    Committer,
    NamePanes,
    RemoveStaged,
)
from luminosity.io.lakes.contract import Conflict, DataFile, Lake, Mode, NewTable
from luminosity.io.lakes.data_files import Begun, WriteFiles
from luminosity.io.lakes.delta_lake import DeltaLake
from luminosity.io.lakes.delta_log import DeltaAddress
from luminosity.io.lakes.iceberg_catalog import IcebergAddress
from luminosity.io.lakes.iceberg_lake import IcebergLake
from luminosity.io.run_owner import owner_of
from luminosity.io.writing.destination import IfEmpty
from luminosity.io.writing.window_files import GroupByPane, check_windows
from luminosity.runs.run_ids import RunIdentity, new_id, run_identity
from luminosity.tables.schemas import known_schema

__all__ = ["SchemaChanges", "WriteDelta", "WriteIceberg", "WriteLake", "lake_by_name"]

SchemaChanges = Literal["refuse", "add"]
_ATTEMPTS = 5  # to add columns while others change the table


class WriteLake(beam.PTransform[Any, Any]):
    """What both transforms have in common: everything but the address of the table."""

    def __init__(
        self,
        lake: Lake,
        *,
        mode: Mode = "append",
        keys: Sequence[str] = (),
        partition_by: str | Sequence[str] = (),
        schema: pa.Schema | None = None,
        schema_changes: SchemaChanges = "refuse",
        allow_empty: bool = False,
    ) -> None:
        super().__init__()
        if mode not in get_args(Mode):
            raise InvalidArgument(f"found mode={mode!r}, expected one of {', '.join(map(repr, get_args(Mode)))}")
        keys = (keys,) if isinstance(keys, str) else tuple(keys)
        if (mode == "upsert") != bool(keys):
            raise InvalidArgument(
                f"found mode={mode!r} and keys={list(keys)}, expected keys for 'upsert' and only for it"
            )
        if schema_changes not in get_args(SchemaChanges):
            raise InvalidArgument(f"found schema_changes={schema_changes!r}, expected 'refuse' or 'add'")
        self._lake = lake
        self._mode: Mode = mode
        self._keys = keys
        self._partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self._schema = schema
        self._changes: SchemaChanges = schema_changes
        self._if_empty: IfEmpty = "write" if allow_empty else "fail"

    def keep_if_empty(self) -> WriteLake:
        """Return the same transform, except that no rows leave the old table and are no error."""
        other = copy.copy(self)
        other._if_empty = "keep"
        return other

    def check(self, schema: pa.Schema | None, *, is_resumed: bool = False) -> None:
        """Raise if rows with these columns can't be written. Called when the transform is applied.

        ``schema`` is None if the columns are not known before the run: they are checked with the first batch then.
        """
        lake = self._lake
        lake.check(self._mode)
        stored = lake.schema()
        for there in (stored, schema):
            if there is not None:
                check_keys(lake.name, self._keys, there)
        if stored is None:
            if schema is not None:
                lake.check_new(NewTable(storable(lake.name, schema), self._partition_by))
            return
        if schema is None and self._changes == "add":
            raise WriteError(
                f"{lake.name}: found schema_changes='add', but the columns of the rows are not known before the run",
                fix=Fix("pass schema= with the columns of the rows"),
            )
        if schema is not None:
            check_fits(lake.name, stored, schema, may_add=self._changes == "add")
        if self._mode == "create" and not is_resumed and lake.has_rows():
            raise WriteError(
                f"{lake.name}: the table has rows",
                fix=Fix(
                    "pass if_exists='replace' or 'append', or choose another name",
                    command="add --if-exists replace or append, or choose another name",
                ),
            )

    def annotations(self) -> dict[str, Any]:
        """Return the transform's annotations, with the table that it writes."""
        return {**super().annotations(), WRITES: json.dumps([{"path": self._lake.name, "kind": "lake"}])}

    def display_data(self) -> dict[str, Any]:
        """Return the table and the mode."""
        return {"table": self._lake.name, "mode": self._mode}

    def expand(self, input_or_inputs: Any) -> Any:
        """Write data files in parallel, and commit them in one step, or in one for each pane of a stream."""
        table, pipeline = input_or_inputs, input_or_inputs.pipeline
        identity = run_identity(pipeline)
        known = self._schema if self._schema is not None else known_schema(table)
        self.check(known, is_resumed=identity.is_resumed)
        if not table.is_bounded:
            self._check_stream(table)
        new = None
        if known is not None:
            new = NewTable(storable(self._lake.name, known), self._partition_by)
        begin = _Begin(self._lake, new, identity, is_staged=bool(self._keys), adds=self._changes == "add")
        once = pipeline | "Once" >> beam.Impulse()
        begun = AsSingleton(once | "Begin" >> beam.ParDo(begin).with_output_types(Begun))
        windowing = table.windowing
        table |= (
            "Global" >> beam.WindowInto(GlobalWindows())
            if table.is_bounded
            else "Gather" >> beam.Reshuffle()  # A source of a stream has short bundles: too many files.
        )
        with pipeline.transform_annotations(**{WRITES_A_FILE_PER_BUNDLE: b""}):
            write = beam.ParDo(WriteFiles(self._lake, self._keys, self._partition_by), begun)
            written = table | "Write" >> write.with_output_types(DataFile)
        committer = Committer(self._lake, self._mode == "overwrite", self._keys, self._if_empty)
        if table.is_bounded:
            collect = beam.Map(_collect, AsList(written), begun).with_output_types(tuple[list[DataFile], Begun])
            files = once | "Collect" >> collect
            done = identity.stable(files) | "Commit" >> beam.ParDo(CommitOnce(committer)).with_output_types(Committed)
        else:
            panes = written | "ByPane" >> GroupByPane()
            name = beam.ParDo(NamePanes(windowing.windowfn.get_window_coder()))
            named = panes | "Name" >> name.with_output_types(tuple[bytes, Any])
            done = named | "Commit" >> CommitPanesInOrder(committer, windowing, begun)
        remove = beam.ParDo(RemoveStaged(self._lake, is_durable=identity.is_durable))
        # Staged files stay until the rows are committed: the step before may be retried.
        return done | "Committed" >> beam.Reshuffle() | "CleanUp" >> remove.with_output_types(str)

    def _check_stream(self, table: Any) -> None:
        check_windows(self._lake.name, table.windowing)
        if self._mode == "overwrite":
            raise WriteError(
                f"{self._lake.name}: found a stream and mode='overwrite', expected 'append' or 'upsert': the new rows "
                "would never be complete",
                fix=Fix("pass mode='append', or mode='upsert' and keys="),
            )


class WriteIceberg(WriteLake):
    """Writes record batches to an Iceberg table without Java, and emits the table's name with the new version.

    Workers write data files, and one step commits all of them: readers see all rows of a run or none. The snapshot's
    summary has the run's id, so that a commit that is repeated is recognised: every row is in the table once, also if
    the run is killed at any point and continued. In a stream, the rows of a window are one commit.

    >>> import tempfile
    >>> from pyiceberg.catalog import load_catalog
    >>> folder = tempfile.mkdtemp()
    >>> settings = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": folder}
    >>> load_catalog("main", **settings).create_namespace("shop")
    >>> rows = pa.record_batch({"id": [1, 2], "lang": ["en", "de"]})
    >>> with beam.Pipeline("FnApiRunner") as pipeline:
    ...     table = pipeline | beam.Create([rows])
    ...     _ = table | WriteIceberg("main.shop.texts", catalog=settings, partition_by="lang", schema=rows.schema)
    >>> load_catalog("main", **settings).load_table("shop.texts").scan().to_arrow().num_rows
    2
    """

    def __init__(
        self,
        table: str,
        *,
        catalog: Mapping[str, str] | None = None,
        mode: Literal["append", "overwrite", "upsert"] = "append",
        keys: str | Sequence[str] = (),
        partition_by: str | Sequence[str] = (),
        schema: pa.Schema | None = None,
        schema_changes: SchemaChanges = "refuse",
        allow_empty: bool = False,
    ) -> None:
        """
        Args:
            table: ``CATALOG.NAMESPACE.TABLE``. If there is no such table, it is made when the run starts.
            catalog: the properties of the catalog, as pyiceberg takes them. None takes those that ``~/.pyiceberg.yaml``
                or the environment has for it.
            mode: ``"append"`` adds rows; ``"overwrite"`` replaces all rows, but never by none, unless ``allow_empty``
                is set; ``"upsert"`` replaces rows with the same keys and adds the others.
            keys: the columns that identify rows, for ``"upsert"``. A commit may have one row of each key.
            partition_by: the partitions of a new table: columns, or transforms such as ``"day(at)"``,
                ``"bucket(16, id)"`` and ``"truncate(4, text)"``. A table that exists keeps its own.
            schema: the columns of the rows: they are checked before the run, and a new table is made when it starts.
                None takes those that ``ReadTable`` or ``MapTable`` right before tells, or those of the first rows.
            schema_changes: what to do with columns that the table does not have: ``"refuse"`` them, or ``"add"`` them
                to the table when the run starts.
            allow_empty: whether ``"overwrite"`` may leave the table without rows.
        """
        super().__init__(
            IcebergLake(IcebergAddress.of(table, catalog)),
            mode=mode,
            keys=keys,
            partition_by=partition_by,
            schema=schema,
            schema_changes=schema_changes,
            allow_empty=allow_empty,
        )


class WriteDelta(WriteLake):
    """Writes record batches to a Delta table without Java, and emits the table's name with the new version.

    Workers write data files, and one step commits all of them: readers see all rows of a run or none. The commit has
    a transaction of the run, so that one that is repeated is recognised: every row is in the table once, also if the
    run is killed at any point and continued. In a stream, the rows of a window are one commit.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp() + "/texts"
    >>> rows = pa.record_batch({"id": [1, 2], "lang": ["en", "de"]})
    >>> with beam.Pipeline("FnApiRunner") as pipeline:
    ...     _ = pipeline | beam.Create([rows]) | WriteDelta(folder, partition_by="lang", schema=rows.schema)
    >>> from deltalake import DeltaTable
    >>> DeltaTable(folder).to_pyarrow_table().num_rows
    2
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, str] | None = None,
        mode: Literal["append", "overwrite", "upsert"] = "append",
        keys: str | Sequence[str] = (),
        partition_by: str | Sequence[str] = (),
        schema: pa.Schema | None = None,
        schema_changes: SchemaChanges = "refuse",
        allow_empty: bool = False,
    ) -> None:
        """
        Args:
            path: the folder of the table, or its address on a store that deltalake knows. If there is no table, it is
                made when the run starts.
            storage_options: credentials and settings of the store, as deltalake takes them.
            mode: ``"append"`` adds rows; ``"overwrite"`` replaces all rows, but never by none, unless ``allow_empty``
                is set; ``"upsert"`` replaces rows with the same keys and adds the others.
            keys: the columns that identify rows, for ``"upsert"``. A commit may have one row of each key.
            partition_by: the columns whose values are folders, of a new table. A table that exists keeps its own.
            schema: the columns of the rows: they are checked before the run, and a new table is made when it starts.
                None takes those that ``ReadTable`` or ``MapTable`` right before tells, or those of the first rows.
            schema_changes: what to do with columns that the table does not have: ``"refuse"`` them, or ``"add"`` them
                to the table when the run starts.
            allow_empty: whether ``"overwrite"`` may leave the table without rows.
        """
        super().__init__(
            DeltaLake(DeltaAddress.of(os.fspath(path), storage_options)),
            mode=mode,
            keys=keys,
            partition_by=partition_by,
            schema=schema,
            schema_changes=schema_changes,
            allow_empty=allow_empty,
        )


def lake_by_name(
    name: str,
    partition_by: str | Sequence[str] | None,
    if_exists: str,
    schema: pa.Schema | None,
    allow_empty: bool | pa.Schema,
) -> WriteLake | None:
    """Return what writes the table of this name with the arguments of ``WriteTable``, or None for a path."""
    found = kind_of(name)
    if found is None:
        return None
    kind, rest = found
    if kind not in _KINDS:
        raise WriteError(f"{name}: tables of this kind are only read, expected iceberg:… or delta:…, or a path")
    if (version := version_of(rest)) is not None:
        raise WriteError(
            f"{name}: found a version of a table, expected the table: a version is never changed",
            fix=f"leave out @{version}",
        )
    if if_exists not in _MODES:
        raise InvalidArgument(f"found if_exists={if_exists!r}, expected 'fail', 'replace' or 'append'")
    if schema is None and isinstance(allow_empty, pa.Schema):
        schema = allow_empty
    return WriteLake(
        _KINDS[kind](rest),
        mode=_MODES[if_exists],
        partition_by=partition_by or (),
        schema=schema,
        allow_empty=allow_empty is not False,
    )


def _iceberg(name: str) -> Lake:
    return IcebergLake(IcebergAddress.of(name, None))


def _delta(path: str) -> Lake:
    return DeltaLake(DeltaAddress.of(path, None))


_KINDS: dict[str, Callable[[str], Lake]] = {"iceberg": _iceberg, "delta": _delta}
_MODES: dict[str, Mode] = {"fail": "create", "replace": "overwrite", "append": "append"}


class _Begin(beam.DoFn):
    """Makes the table unless it exists, adds columns if that is asked for, and draws the id of the run."""

    def __init__(self, lake: Lake, new: NewTable | None, identity: RunIdentity, *, is_staged: bool, adds: bool) -> None:
        self._lake = lake
        self._new = new
        self._is_staged = is_staged
        self._adds = adds
        self._is_durable = identity.is_durable
        self._run = f"{owner_of(identity)}-{identity.number(lake.name) if identity.is_durable else ''}"

    def process(self, element: object) -> Iterator[Begun]:
        """Prepare the table. May be repeated. The id is new for each run, unless the run has a checkpoint."""
        if self._new is not None:
            self._lake.create(self._new)
            if self._adds:
                self._add(self._new)
        run = self._run if self._is_durable else f"{self._run}{new_id()}"
        layout = None if self._lake.schema() is None else self._lake.layout()
        yield Begun(layout, run, is_staged=self._is_staged, is_durable=self._is_durable)

    def _add(self, new: NewTable) -> None:
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._lake.add_columns(list(new.schema))
                return
            except Conflict as error:
                if not left:
                    raise WriteError(
                        f"{self._lake.name}: {_ATTEMPTS} attempts to add columns failed because other writers were "
                        f"faster: {error}",
                        may_pass=True,
                    ) from error


def _collect(_: bytes, written: list[DataFile], begun: Begun) -> tuple[list[DataFile], Begun]:
    return written, begun
