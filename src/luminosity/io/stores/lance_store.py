"""Lance datasets as stores of points.

A dataset says which of its columns has the ids and how vectors are compared in the metadata of its columns. A dataset
without such metadata is searched by cosine, and its column ``id`` has the ids.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.io.filesystems import FileSystems

from luminosity.errors import Fix, InvalidArgument, StoreError
from luminosity.extras import require
from luminosity.io.folders import why_not_writable
from luminosity.io.run_owner import RunOwner
from luminosity.io.stores.address import StoreAddress, check_vectors, missing
from luminosity.io.stores.lance_table import LanceTable, last_of_each, literal
from luminosity.io.stores.points import DELETED, PointColumns, facts_of, json_values
from luminosity.io.stores.staging import StagedRows, staging_folders
from luminosity.io.stores.store import Hit, Query, Staged, StagedStore, StagedWriter, WriteMode, count_points, is_near
from luminosity.runs.run_ids import CheckpointedRun

__all__ = ["LanceStore", "check_dataset"]

_DISTANCE, _ID = b"luminosity.distance", b"luminosity.id"  # metadata of a column of vectors, and of the column of ids
_METRICS = {"cosine": "cosine", "dot": "dot", "euclid": "l2"}  # Lance has no Manhattan distance
_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # Lance refuses other names, but only after all rows are written.


class LanceStore(StagedStore):
    """A dataset as a store of points: rows with the same id replace each other. Its path is the whole address."""

    kind = "lance"
    form = "a path that ends in .lance"
    has_collections = False

    def __init__(self, address: StoreAddress, on_retry: Callable[[], None] = lambda: None) -> None:
        self._address = address
        self._table = LanceTable(address.where)

    @classmethod
    def handles(cls, where: str) -> bool:
        """Return whether the path ends in ``.lance``."""
        return where.rstrip("/").endswith(".lance")

    @classmethod
    def address(cls, where: str, collection: str | None, **settings: Any) -> StoreAddress:
        """Return the address. A dataset has no collections, and no key."""
        where = where.rstrip("/")
        check_dataset(where)
        if collection:
            raise InvalidArgument(
                f"found the collection {collection!r} and the dataset {where}, expected only the dataset",
                fix=Fix("leave out the collection", command="leave out --collection"),
            )
        if settings.get("api_key") is not None or settings.get("api_key_env") is not None:
            raise InvalidArgument(f"found an API key for the dataset {where}, expected one for servers only")
        return StoreAddress(where, "", **settings)

    @classmethod
    def place(cls, address: StoreAddress) -> dict[str, str]:
        """Return the path and the kind."""
        where = address.where if "://" in address.where else os.path.abspath(address.where)
        return {"path": where, "kind": cls.kind}

    @classmethod
    def staging_place(cls, address: StoreAddress) -> str:
        """Return the path of the dataset without its suffix."""
        return address.where.removesuffix(".lance")

    @classmethod
    def check_reachable(cls, address: StoreAddress) -> None:
        """Raise if lancedb is not installed."""
        require("lancedb", "lance")

    @classmethod
    def check_writable(cls, address: StoreAddress, mode: WriteMode) -> None:
        """Raise if the dataset can't be written, if it exists and must not, or if another run replaces it."""
        if mode.distance not in _METRICS:
            raise InvalidArgument(
                f"{address}: found distance={mode.distance!r}, expected one of {', '.join(_METRICS)}, which Lance has"
            )
        cls.check_access(address.where, mode.if_exists == "replace", RunOwner.current())
        if FileSystems.get_scheme(address.where) is None and mode.if_exists == "fail":
            mode.check(address, os.path.exists(address.where))

    @staticmethod
    def check_access(path: str, replaces: bool, *mine: RunOwner | CheckpointedRun) -> None:
        """Raise if a dataset of this machine can't be written, or if a run other than ``mine`` writes it, too."""
        if FileSystems.get_scheme(path) is not None:
            return
        if reason := why_not_writable(path):
            raise StoreError(f"{path}: {reason}", fix="choose another path, or make this one writable")
        for folder, owner in staging_folders(path.removesuffix(".lance")) if replaces else ():
            if owner not in mine and owner.is_alive(folder):
                raise StoreError(
                    f"{path}: {owner.describe()} is writing it right now", fix="wait until that run has ended"
                )

    @classmethod
    def writer(cls, address: StoreAddress, columns: PointColumns, mode: WriteMode, run: str) -> StagedWriter:
        """Return what merges staged rows into the dataset, or replaces it."""
        return _PointWriter(address, columns, mode)

    def vectors(self) -> dict[str, tuple[int, str]] | None:
        """Return the columns that are lists of floats of a fixed size."""
        table = self._table.opened()
        if table is None:
            return None
        return {
            field.name: (field.type.list_size, (field.metadata or {}).get(_DISTANCE, b"cosine").decode())
            for field in table.schema
            if pa.types.is_fixed_size_list(field.type) and pa.types.is_floating(field.type.value_type)
        }

    def count(self) -> int:
        """Return the number of rows."""
        return self._there().count_rows()

    def search(self, vectors: Sequence[Sequence[float]], query: Query) -> list[list[Hit]]:
        """Search for one vector after the other. The search is exact unless the dataset has an index."""
        table = self._there()
        using = query.using or next(iter(self.vectors() or {}))
        distance = (self.vectors() or {})[using][1]
        if not query.equal.keys() <= set(table.schema.names):
            return [[] for _ in vectors]  # No row has a value there.
        found: list[list[Hit]] = []
        with self._table.errors():
            for vector in vectors:
                search = table.search(list(vector), vector_column_name=using).distance_type(_METRICS[distance])
                if query.equal:
                    search = search.where(_condition(query.equal), prefilter=True)
                rows = search.limit(query.limit).with_row_id(True).to_arrow()
                scores = [_score(distance, value) for value in rows["_distance"].to_pylist()]
                hits = self._hits(rows, scores, query.payload)
                found.append([hit for hit in hits if is_near(distance, hit.score, query.score_threshold)])
        return found

    def sample(self, limit: int, field: str | None = None) -> list[Hit]:
        """Return the first rows, or the first with a value in a column."""
        table = self._there()
        if field is not None and field not in table.schema.names:
            return []
        with self._table.errors():
            search = table.search()
            search = search if field is None else search.where(f"`{field}` IS NOT NULL")
            rows = search.limit(limit).with_row_id(True).to_arrow()
        hidden = {*(self.vectors() or {}), "_rowid"}
        return self._hits(rows, [0.0] * len(rows), [name for name in rows.schema.names if name not in hidden])

    def close(self) -> None:
        """Do nothing: the dataset is not open between calls."""

    def _there(self) -> Any:
        table = self._table.opened()
        if table is None:
            raise missing(self._address)
        return table

    def _hits(self, rows: Any, scores: Sequence[float], payload: Sequence[str]) -> list[Hit]:
        names = [field.name for field in rows.schema if _ID in (field.metadata or {})]
        own = names[0] if names else "id" if "id" in rows.schema.names else "_rowid"
        columns = {name: json_values(rows[name].combine_chunks()) for name in payload if name in rows.schema.names}
        return [
            Hit(identity, scores[row], {name: values[row] for name, values in columns.items()})
            for row, identity in enumerate(rows[own].to_pylist())
        ]


@dataclass(frozen=True)
class _PointWriter(StagedWriter):
    """Merges rows by their ids, or replaces all rows. The output is the number of rows."""

    address: StoreAddress
    columns: PointColumns
    mode: WriteMode

    def check(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Check all rows, and return the columns of the dataset; vectors are lists of any size until all are known."""
        changes = self.columns.changes(batch)
        columns = {self.columns.id: _plain_ids(batch.column(self.columns.id))}
        columns |= {name: batch.column(name) for name in self.columns.payload_names(batch.schema)}
        for name, column in self.columns.vectors.items():
            columns[name or column] = batch.column(column).cast(pa.list_(pa.float32()))
        if DELETED in batch.schema.names:
            columns[DELETED] = batch.column(DELETED)
        deletes = sum(point is None for point in changes.points.values())
        count_points(len(changes.points) - deletes, deletes)
        return pa.record_batch(columns)

    def commit(self, staged: Sequence[Staged], folder: str) -> list[int]:
        """Write the rows of all files. A note tells a repeated call that the dataset is its own."""
        note, table, store = FileSystems.join(folder, "note.json"), LanceTable(self.address.where), self._store()
        rows, count, there = StagedRows.with_rows(staged), sum(rows for _, rows in staged), store.vectors()
        self.mode.check_rows(self.address, count)
        if not table.is_begun(note):
            self.mode.check(self.address, there is not None)
        if not count:
            if self.mode.if_exists == "replace":
                table.clear()
            return []
        if self.mode.if_exists != "replace":
            self._merge(rows, there, ())
        else:
            schema = self._schema(rows, there)
            live = (_without_deleted(each, self.columns.id) for each in rows.batches())
            tables = (each.select(schema.names).cast(schema) for each in live)
            batches = (batch for each in tables for batch in each.to_batches())
            table.overwrite(pa.RecordBatchReader.from_batches(schema, batches))
        return [count]

    def commit_pane(
        self, staged: Sequence[Staged], newer: Collection[Hashable], folder: str
    ) -> tuple[list[int], Collection[Hashable], list[str]]:
        """Merge the rows of a pane."""
        rows, count = StagedRows.with_rows(staged), sum(rows for _, rows in staged)
        if not count:
            return [], (), []
        there = self._store().vectors()
        self.mode.check(self.address, there is not None)
        return [count], self._merge(rows, there, newer), []

    def _store(self) -> LanceStore:
        return LanceStore(self.address)

    def _merge(
        self, rows: StagedRows, there: Mapping[str, tuple[int, str]] | None, newer: Collection[Hashable]
    ) -> Collection[Hashable]:
        if there is None and all(_live(each) == 0 for each in rows.batches()):
            return ()  # There is nothing to delete from.
        schema = self._schema(rows, there)
        return LanceTable(self.address.where).merge(rows, self.columns.id, newer, schema)

    def _schema(self, rows: StagedRows, there: Mapping[str, tuple[int, str]] | None) -> pa.Schema:
        """Return the columns of the dataset. Raises if it has other vectors than the rows."""
        facts = facts_of(rows.batches(), self._staged_columns)
        replaced = self.mode.if_exists == "replace"
        sizes = facts.sizes_for(None if replaced else there, self._staged_columns)
        if there is not None and not replaced:
            check_vectors(self.address, there, sizes, self.mode.distance)
        distance = {_DISTANCE: self.mode.distance.encode()}
        fields = [field for field in rows.schema if field.name not in (*sizes, DELETED)]
        return pa.schema(
            [
                *(field.with_metadata({_ID: b"1"}) if field.name == self.columns.id else field for field in fields),
                *(pa.field(name, pa.list_(pa.float32(), size), metadata=distance) for name, size in sizes.items()),
            ]
        )

    @property
    def _staged_columns(self) -> PointColumns:
        names = [name or column for name, column in self.columns.vectors.items()]
        return PointColumns({name: name for name in names}, self.columns.id)


def check_dataset(path: str) -> None:
    """Raise unless a path is one of a Lance dataset."""
    name = os.path.basename(path)
    if not name.endswith(".lance") or name == ".lance":
        raise InvalidArgument(f"found path={path!r}, expected one that ends in .lance, such as data/reviews.lance")
    if not _NAME.fullmatch(name.removesuffix(".lance")):
        raise InvalidArgument(f"found path={path!r}, expected a name of Latin letters, digits, '_', '-' and '.'")


def _score(distance: str, value: float) -> float:
    """Return Lance's distance as the score that other stores give: cosine and product, or the Euclidean distance.

    >>> _score("cosine", 0.25), _score("dot", -1.0), _score("euclid", 9.0)
    (0.75, 2.0, 3.0)
    """
    return math.sqrt(value) if distance == "euclid" else 1 - value


def _condition(equal: Mapping[str, Any]) -> str:
    """Return a filter as SQL.

    >>> _condition({"language": ["en", "de"], "rating": {"gte": 4}, "new": True})
    "`language` IN ('en', 'de') AND `rating` >= 4 AND `new` IN (true)"
    """
    signs = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
    parts: list[str] = []
    for name, value in equal.items():
        if isinstance(value, Mapping):
            parts += [f"`{name}` {signs[sign]} {bound}" for sign, bound in value.items()]
        else:
            values = value if isinstance(value, list) else [value]
            parts.append(f"`{name}` IN ({', '.join(map(literal, values))})")
    return " AND ".join(parts)


def _plain_ids(column: Any) -> Any:
    """Return ids as integers or texts, by which Lance can merge."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column if pa.types.is_integer(column.type) else pa.array(map(str, column.to_pylist()), pa.string())


def _live(batch: pa.RecordBatch) -> int:
    deleted = 0 if DELETED not in batch.schema.names else batch.column(DELETED).to_pylist().count(True)
    return batch.num_rows - deleted


def _without_deleted(batch: pa.RecordBatch, key: str) -> pa.Table:
    rows = last_of_each(pa.Table.from_batches([batch]), key)
    if DELETED not in rows.schema.names:
        return rows
    marks = pc.field(DELETED)
    return rows.filter(marks.is_null() | ~marks)
