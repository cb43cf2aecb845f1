"""Rows of a table as points of a store: an id, vectors and a payload."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from luminosity._shared.text import list_some
from luminosity.errors import InvalidArgument, StoreError
from luminosity.io.stores.payload import json_values
from luminosity.io.stores.vectors import VectorColumn, read_vectors

__all__ = ["DELETED", "Changes", "Point", "PointColumns", "PointId", "check_id_type", "point_id"]


DELETED = "_deleted"
"""The column that marks rows whose points are to be deleted."""

PointId = int | str

_SHOWN_COLUMNS = 20  # in a message, which stays readable

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
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
        names = self._payload_names(batch.schema)
        check_id_type(self.id, batch.schema.field(self.id).type)
        values = batch.column(self.id).to_pylist()
        deleted = _marks(batch)

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

    def _payload_names(self, schema: Any) -> list[str]:
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


def _marks(batch: pa.RecordBatch) -> list[bool | None]:
    if DELETED not in batch.schema.names:
        return [False] * batch.num_rows
    return batch.column(DELETED).to_pylist()


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
    if _UUID.fullmatch(value):
        return value.lower(), True
    return str(uuid.uuid5(_NAMESPACE, value)), False
