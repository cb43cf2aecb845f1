"""Rows of a table as points of a store: an id, vectors and a payload of JSON values.

Vectors are checked here, because stores accept NaN silently and never find such a point again.
"""

from __future__ import annotations

import base64
import math
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from luminosity._shared.text import list_some
from luminosity.errors import Fix, InvalidArgument, StoreError

__all__ = [
    "DELETED",
    "UUID",
    "Changes",
    "Point",
    "PointColumns",
    "PointId",
    "TableFacts",
    "check_id_type",
    "check_sizes",
    "facts_of",
    "json_values",
    "known_sizes",
    "point_id",
    "point_writes",
    "read_vectors",
    "split",
]

DELETED = "_deleted"
"""The column that marks rows whose points are to be deleted."""
PointId = int | str
_SHOWN_COLUMNS = 20  # in a message, which stays readable
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
"""What the text of a UUID looks like."""
_NAMESPACE = uuid.UUID("6f1a3d0e-4f0b-5c7e-9a53-0d0c5a6c1f27")
"""Never change it: a text must become the same id in every run, otherwise updates would be additions."""


@dataclass(frozen=True)
class Point:
    """A vector with id and payload; the name of a vector may be empty."""

    id: PointId
    vectors: Mapping[str, list[float]]
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class Changes:
    """The changes that rows ask for. An id has one entry, that of its last row; None means its deletion."""

    points: dict[PointId, Point | None]
    sizes: dict[str, int | None]
    """The size of each vector; None if no row tells."""


@dataclass(frozen=True)
class PointColumns:
    """The columns that make a point."""

    vectors: Mapping[str, str]
    id: str = "id"
    payload: Sequence[str] | None = None

    def changes(self, batch: pa.RecordBatch, first_row: int = 0) -> Changes:
        """Return the changes that a batch asks for; ``first_row`` is the number of its first row in messages.

        >>> import pyarrow as pa
        >>> rows = pa.record_batch({"id": [1, 1], "v": [[1.0], [2.0]], "n": ["a", "b"]})
        >>> PointColumns({"": "v"}).changes(rows).points
        {1: Point(id=1, vectors={'': [2.0]}, payload={'n': 'b'})}
        """
        names = self.payload_names(batch.schema)
        check_id_type(self.id, batch.schema.field(self.id).type)
        values = batch.column(self.id).to_pylist()
        has_marks = DELETED in batch.schema.names
        deleted = batch.column(DELETED).to_pylist() if has_marks else [False] * batch.num_rows

        def row_name(row: int) -> str:
            return f"row {first_row + row} (id {values[row]!r})"

        vectors = {
            name: read_vectors(name or column, batch.column(column), row_name) for name, column in self.vectors.items()
        }
        payloads = [json_values(batch.column(name)) for name in names]
        points: dict[PointId, Point | None] = {}
        for row, value in enumerate(values):
            identity, is_kept = self._identity(value, row_name(row))
            points.pop(identity, None)
            if deleted[row]:
                points[identity] = None
                continue
            payload = {name: column[row] for name, column in zip(names, payloads, strict=True)}
            if not is_kept:
                payload[self.id] = value
            points[identity] = Point(identity, _vectors_of(vectors, row, row_name), payload)
        return Changes(points, {name: column.size for name, column in vectors.items()})

    def payload_names(self, schema: Any) -> list[str]:
        """Return the columns of the payload. Raises if a column is missing."""
        wanted = [self.id, *self.vectors.values(), *(self.payload or ())]
        if missing := [name for name in wanted if name not in schema.names]:
            raise StoreError(
                f"there is no column {missing[0]!r}, expected one of {list_some(schema.names, _SHOWN_COLUMNS)}"
            )
        if self.payload is not None:
            return list(self.payload)
        return [name for name in schema.names if name not in (*wanted, DELETED)]

    def _identity(self, value: Any, row: str) -> tuple[PointId, bool]:
        if value is None:
            raise StoreError(f"{row} has no id, expected one in the column {self.id!r}")
        try:
            return point_id(value)
        except InvalidArgument as error:
            raise StoreError(f"the id of {row}: {error}") from None


def _vectors_of(
    columns: Mapping[str, VectorColumn], row: int, row_name: Callable[[int], str]
) -> dict[str, list[float]]:
    """Return the vectors of a row without nulls. A point without any vector could never be found: raise then."""
    found = {name: vector for name, column in columns.items() if (vector := column.rows[row]) is not None}
    if not found:
        raise StoreError(
            f"{row_name(row)} has only null vectors, expected at least one vector",
            fix=f"drop these rows, or set {DELETED} to delete their points",
        )
    return found


def check_id_type(name: str, kind: Any) -> None:
    """Raise unless a column of this type can hold ids: unsigned integers, UUIDs or texts, which Qdrant takes."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (pa.types.is_integer(kind) or is_text or str(kind) == "extension<arrow.uuid>"):
        raise StoreError(f"the id column {name!r} is of type {kind}, expected unsigned integers, UUIDs or strings")


def point_id(value: int | str | uuid.UUID) -> tuple[PointId, bool]:
    """Return the point's id, and whether the value can be recovered from it. Other texts become UUIDs.

    >>> point_id(7), point_id("0FD9D9A2-0B1E-4A6F-9C87-0A2F5F0D3E11")
    ((7, True), ('0fd9d9a2-0b1e-4a6f-9c87-0a2f5f0d3e11', True))
    >>> point_id("review-7")
    ('7fbb56d3-dc54-545c-be3e-350c7cb68e4a', False)
    """
    if isinstance(value, int):
        if value < 0:
            raise InvalidArgument(f"found {value}, expected an integer of 0 or more")
        return value, True
    if isinstance(value, uuid.UUID):
        return str(value), True
    if UUID.fullmatch(value):
        return value.lower(), True
    return str(uuid.uuid5(_NAMESPACE, value)), False


@dataclass(frozen=True)
class TableFacts:
    """What must be known of all rows before the first is written."""

    rows: int = 0
    points: int = 0  # without those that are deleted
    sizes: dict[str, int] = field(default_factory=dict[str, int])

    def sizes_for(self, there: Mapping[str, tuple[int, str]] | None, columns: PointColumns) -> dict[str, int]:
        """Return the sizes of the vectors; those that no row tells are taken from the store, if it exists."""
        known = {name: (there or {})[name][0] for name in columns.vectors if name in (there or {})}
        return known_sizes(known | self.sizes, columns)


def facts_of(batches: Iterable[pa.RecordBatch], columns: PointColumns) -> TableFacts:
    """Return the facts of some rows. Raises if their vectors differ in size."""
    rows, points, sizes = 0, 0, dict[str, int]()
    for batch in batches:
        changes = columns.changes(batch)
        rows += batch.num_rows
        points += sum(point is not None for point in changes.points.values())
        check_sizes(sizes, changes.sizes, columns)
    return TableFacts(rows, points, sizes)


def point_writes(
    batches: Iterable[pa.RecordBatch], columns: PointColumns, batch_size: int
) -> Iterator[tuple[dict[PointId, Point | None], int]]:
    """Yield the changes of all batches in writes of about ``batch_size`` points, each with its number of rows."""
    points: dict[PointId, Point | None] = {}
    count = 0
    for batch in batches:
        first = 0
        while first < batch.num_rows:
            rows = batch.slice(first, batch_size - len(points))
            points |= columns.changes(rows, first).points
            first, count = first + rows.num_rows, count + rows.num_rows
            if len(points) >= batch_size:
                yield points, count
                points, count = {}, 0
    if points:
        yield points, count


def split(points: Mapping[PointId, Point | None], newer: Collection[Any] = ()) -> tuple[list[Point], list[PointId]]:
    """Return the points to upsert, and the ids of those to delete, without those in ``newer``."""
    upserts = [point for identity, point in points.items() if point is not None and identity not in newer]
    return upserts, [identity for identity, point in points.items() if point is None and identity not in newer]


def check_sizes(known: dict[str, int], found: Mapping[str, int | None], columns: PointColumns) -> None:
    """Add the sizes of vectors that a batch tells to ``known``; raise if another batch told others."""
    for name, size in found.items():
        if size is not None and known.setdefault(name, size) != size:
            less, more = sorted((size, known[name]))  # The order of batches is random.
            raise StoreError(
                f"the vector {name or columns.vectors[name]!r} has {less} numbers in one batch and {more} in another, "
                "expected the same in all batches"
            )


def known_sizes(sizes: dict[str, int], columns: PointColumns) -> dict[str, int]:
    """Return the sizes; raise if that of a vector is unknown."""
    if unknown := columns.vectors.keys() - sizes.keys():
        raise StoreError(
            f"the size of the vector {min(unknown)!r} is unknown: the column {columns.vectors[min(unknown)]!r} is null "
            "in all rows",
            fix=Fix("cast the column to fixed-size lists, whose type tells the size"),
        )
    return sizes


@dataclass(frozen=True)
class VectorColumn:
    """The vectors of a column, one for each row; None where the row is null."""

    size: int | None
    """None if no row tells."""
    rows: list[list[float] | None]


def read_vectors(name: str, column: Any, row_name: Callable[[int], str]) -> VectorColumn:
    """Return the vectors of a column; ``row_name`` returns the name of a row in messages.

    >>> read_vectors("v", pa.array([[1, 2], None], pa.list_(pa.float32(), 2)), str)
    VectorColumn(size=2, rows=[[1.0, 2.0], None])
    """
    fixed = pa.types.is_fixed_size_list(column.type)
    if not (fixed or pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise StoreError(f"the vector column {name!r} is of type {column.type}, expected lists of numbers")
    places = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    present = column.drop_null()
    size = column.type.list_size if fixed else _common_size(name, present, places, row_name)
    rows: list[list[float] | None] = [None] * len(column)
    if not size or not len(present):
        return VectorColumn(size, rows)
    numbers = present.flatten().cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)  # Nulls become NaN.
    matrix = numbers.reshape(-1, size)
    bad = np.flatnonzero(~np.isfinite(matrix).all(axis=1))
    if len(bad):
        raise StoreError(
            f"the vector {name!r} of {row_name(int(places[bad[0]]))} has a number in it that is null, NaN, infinite or "
            "too large for float32, expected finite numbers"
        )
    for place, vector in zip(places.tolist(), matrix.tolist(), strict=True):
        rows[place] = vector
    return VectorColumn(size, rows)


def _common_size(name: str, present: Any, places: np.ndarray, row_name: Callable[[int], str]) -> int | None:
    if not len(present):
        return None
    sizes = pc.call_function("list_value_length", [present]).to_numpy(zero_copy_only=False)
    other = np.flatnonzero(sizes != sizes[0])
    if len(other):
        raise StoreError(
            f"the vector {name!r} of {row_name(int(places[other[0]]))} has {sizes[other[0]]} numbers, that of "
            f"{row_name(int(places[0]))} has {sizes[0]}; expected the same for all"
        )
    return int(sizes[0])


def json_values(column: Any) -> list[Any]:
    """Return the values of a column: times in ISO 8601, decimals as text, bytes in base64, NaN as null.

    >>> json_values(pa.array([date(2026, 3, 1), None]))
    ['2026-03-01', None]
    """
    if pa.types.is_string(column.type) or pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        return column.to_pylist()
    narrowed = _in_microseconds(column.type)
    if narrowed != column.type:
        column = column.cast(narrowed, safe=False)
    return [_json_value(value) for value in column.to_pylist()]


def _in_microseconds(kind: Any) -> Any:
    """Return the type without nanoseconds, which Python's times can't hold."""
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_time64(kind) or pa.types.is_duration(kind):
        return pa.time64("us") if pa.types.is_time64(kind) else pa.duration("us")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_microseconds(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_in_microseconds(kind.value_type))
    return kind


def _json_value(value: Any) -> Any:
    """Return a value as JSON.

    >>> _json_value({"price": Decimal("1.50"), "raw": b"ab", "seen": [1, math.nan], "took": timedelta(minutes=1)})
    {'price': '1.50', 'raw': 'YWI=', 'seen': [1, None], 'took': 60.0}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal | uuid.UUID):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(key): _json_value(inner) for key, inner in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in cast("list[Any]", value)]
    raise StoreError(f"found a value of type {type(value).__name__} in the payload, which JSON can't hold")
