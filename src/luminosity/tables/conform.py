"""Batches with the columns that were asked for, or a message that says what is different."""

from __future__ import annotations

import pyarrow as pa

from luminosity.errors import TableError

__all__ = ["conform"]


def conform(batch: pa.RecordBatch, schema: pa.Schema, who: str) -> pa.RecordBatch:
    """The batch with these columns, in this order and of these types; nothing is copied that is right already.

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
        raise TableError(f"{who}: column {field.name!r} has nulls; expected none, as the schema says not null")
    if array.type == field.type:
        return array
    try:
        return array.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise TableError(f"{who}: column {field.name!r}: found {array.type}, expected {field.type}: {error}") from error
