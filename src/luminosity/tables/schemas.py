"""The schemas of record batches: their coder, which columns a table is known to have, checks and casts."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam import coders

from luminosity.errors import Fix, InvalidType, TableError
from luminosity.tables.from_python import fits

__all__ = ["RecordBatchCoder", "SameSchema", "conform", "known_schema", "remember_schema"]


_PASS_SCHEMA = Fix("pass MapTable(..., schema=pa.schema([...])) if types depend on the values of a batch")
_MOST_SCHEMAS = 100  # remembered by one step; bounds its memory if every batch has another schema
_SCHEMA = "_luminosity_schema"  # an attribute of a PCollection
_MOST_RESHUFFLES = 10  # to look through; pipelines have fewer


class RecordBatchCoder(coders.Coder):
    """Encodes the schema with the rows, so that every element can be read alone. A slice is encoded without its rest.

    >>> coder = RecordBatchCoder()
    >>> batch = pa.record_batch({"text": ["a", None]})
    >>> coder.decode(coder.encode(batch)).equals(batch)
    True
    """

    def encode(self, value: pa.RecordBatch) -> bytes:
        """Write the batch, with its schema, as an Arrow IPC stream."""
        if not isinstance(value, pa.RecordBatch):
            raise InvalidType(
                f"found an element of type {type(value).__name__}, expected a pyarrow.RecordBatch",
                fix=Fix("apply TableFromRows() first, which makes them from dicts, Beam Rows and dataclasses"),
            )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, value.schema) as writer:
            writer.write_batch(value)
        return sink.getvalue().to_pybytes()

    def decode(self, encoded: bytes) -> pa.RecordBatch:
        """Read the batch from its Arrow IPC stream, without copying the columns."""
        with pa.ipc.open_stream(encoded) as reader:
            return reader.read_next_batch()

    def estimate_size(self, value: pa.RecordBatch) -> int:
        """Return the bytes of the batch's columns, without encoding them."""
        try:
            return int(value.nbytes)
        except pa.ArrowTypeError:  # Older Arrow does not know which part of its buffers a column of string views uses.
            return int(value.get_total_buffer_size())

    def to_type_hint(self) -> Any:
        """Return ``pyarrow.RecordBatch``, the type of the elements."""
        return pa.RecordBatch


def remember_schema(table: Any, schema: pa.Schema) -> Any:
    """Note the columns of a PCollection of record batches while a pipeline is built, and return the PCollection."""
    setattr(table, _SCHEMA, schema)
    return table


def known_schema(table: Any) -> pa.Schema | None:
    """Return the columns of a PCollection of record batches, or None if they are not known before the run."""
    for _ in range(_MOST_RESHUFFLES):
        found = getattr(table, _SCHEMA, None)
        producer = getattr(table, "producer", None)
        if found is not None or producer is None:
            return found
        while producer.parent is not None and table in producer.parent.outputs.values():
            producer = producer.parent
        if not isinstance(producer.transform, beam.Reshuffle):
            return None
        [table] = producer.inputs
    return None


def conform(batch: pa.RecordBatch, schema: pa.Schema, who: str) -> pa.RecordBatch:
    """Return the batch with these columns, in this order and with these types; columns that fit are not copied.

    >>> conform(pa.record_batch({"a": [1]}), pa.schema([("a", pa.float64())]), "here").schema.types
    [DataType(double)]

    """
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    found = batch.schema.names
    if sorted(found) != sorted(schema.names):
        missing = [name for name in schema.names if name not in found]
        more = [name for name in found if name not in schema.names]
        raise TableError(
            f"{who}: found the columns {', '.join(found)}; expected {', '.join(schema.names)}"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; not expected: {', '.join(more)}" if more else "")
        )
    arrays = [_cast(batch.column(field.name), field, who) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(array: pa.Array, field: pa.Field, who: str) -> pa.Array:
    if array.null_count and not field.nullable:
        raise TableError(f"{who}: column {field.name!r} has nulls, expected none: the schema does not allow them")
    if array.type == field.type:
        return array
    try:
        return array.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise TableError(f"{who}: column {field.name!r}: found {array.type}, expected {field.type}: {error}") from error


class SameSchema:
    """Remembers the schema of the first result for every schema of inputs, as long as the step lives in the worker.

    >>> same = SameSchema()
    >>> given, first = pa.schema([]), pa.record_batch({"n": [1.5]})
    >>> same.check(given, first, "f") is first
    True
    >>> same.check(given, pa.record_batch({"n": [1]}), "f")["n"].to_pylist()
    [1.0]
    """

    def __init__(self) -> None:
        self._schemas: dict[pa.Schema, pa.Schema] = {}

    def check(self, given: pa.Schema, result: pa.RecordBatch, who: str) -> pa.RecordBatch:
        """Return the result with the schema of the first one, cast if nothing is lost; raise otherwise."""
        if given not in self._schemas:
            if len(self._schemas) >= _MOST_SCHEMAS:
                self._schemas.clear()
            self._schemas[given] = result.schema
        first = self._schemas[given]
        if result.schema.equals(first):
            return result
        if result.schema.names == first.names:
            arrays = [_alike(result.column(field.name), field) for field in first]
            if all(array is not None for array in arrays):
                return pa.RecordBatch.from_arrays(arrays, schema=first)
        raise TableError(
            f"{who} returned other columns than for an earlier batch with the same columns: found "
            f"{_shown(result.schema, first)}, expected {_shown(first, result.schema)}",
            fix=_PASS_SCHEMA,
        )


def _alike(array: pa.Array, field: pa.Field) -> pa.Array | None:
    if array.type == field.type:
        return array
    if not fits(array.type, field.type):
        return None
    try:
        return array.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _shown(schema: pa.Schema, other: pa.Schema) -> str:
    """Return the fields that the other schema does not have."""
    fields = [field for field in schema if field not in list(other)] or list(schema)
    return ", ".join(f"{field.name}: {field.type}" for field in fields)
