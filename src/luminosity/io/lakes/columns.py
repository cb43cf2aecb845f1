"""The types that lakes have, and how the columns of a table become those of its lake, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyarrow import types

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import Fix, WriteError

__all__ = ["as_stored", "check_fits", "check_keys", "plain_type", "storable", "with_plain_types"]

_SHOWN_COLUMNS = 20
_NARROW = {pa.int8(): pa.int32(), pa.int16(): pa.int32(), pa.uint8(): pa.int32(), pa.uint16(): pa.int32()}
_WIDER = {**_NARROW, pa.uint32(): pa.int64(), pa.float16(): pa.float32()}
_EVOLVE = Fix('pass schema_changes="add" to add the columns to the table, or leave them out with MapTable')


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type with 32-bit offsets, without fixed sizes and metadata, as tables have it elsewhere.

    >>> plain_type(pa.large_list(pa.field("element", pa.large_string(), metadata={"PARQUET:field_id": "2"})))
    ListType(list<element: string>)
    """
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_large_string(kind) or kind == pa.string_view():
        return pa.string()
    if types.is_large_binary(kind) or kind == pa.binary_view():
        return pa.binary()
    if types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if types.is_struct(kind):
        return pa.struct([_plain_field(kind.field(at)) for at in range(kind.num_fields)])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, plain_type(field.type), field.nullable)


def with_plain_types(schema: pa.Schema) -> pa.Schema:
    """Return the schema with plain types. Every column may have nulls: filters and older files bring them."""
    return pa.schema([pa.field(field.name, plain_type(field.type)) for field in schema])


def storable(table: str, schema: pa.Schema) -> pa.Schema:
    """Return the columns as a lake stores them: small and unsigned integers are wider there, times have microseconds.

    >>> storable("t", pa.schema({"n": pa.uint8(), "at": pa.timestamp("ns")})).types
    [DataType(int32), TimestampType(timestamp[us])]
    """
    if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise WriteError(
            f"{table}: found several columns named {', '.join(map(repr, twice))}, expected one of each name"
        )
    if not schema.names:
        raise WriteError(f"{table}: found no columns, expected at least one")
    return pa.schema([pa.field(field.name, _storable(table, field.name, plain_type(field.type))) for field in schema])


def _storable(table: str, name: str, kind: pa.DataType) -> pa.DataType:
    if types.is_map(kind):
        return pa.map_(_storable(table, name, kind.key_type), _storable(table, name, kind.item_type))
    if types.is_struct(kind):
        inner = [kind.field(at) for at in range(kind.num_fields)]
        return pa.struct([field.with_type(_storable(table, name, field.type)) for field in inner])
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_storable(table, name, kind.value_type)))
    if kind in _WIDER:
        return _WIDER[kind]
    if types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if types.is_date64(kind):
        return pa.date32()
    if types.is_fixed_size_binary(kind):
        return pa.binary()
    is_known = kind in (pa.bool_(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.date32())
    if is_known or types.is_string(kind) or types.is_binary(kind) or types.is_decimal128(kind):
        return kind
    raise WriteError(
        f"{table}: column {name!r} is {kind}, which Iceberg and Delta don't have",
        fix=Fix("cast the column with MapTable, or drop it", command="leave the column out with --columns"),
    )


def check_fits(table: str, stored: pa.Schema, given: pa.Schema, *, may_add: bool) -> list[pa.Field]:
    """Return the columns that the table lacks. Raises unless rows with these columns can be written to it.

    ``stored`` is the schema of the table. Columns that the rows lack must allow nulls there. New ones need ``may_add``.
    """
    found = storable(table, pa.schema([_of_stored(field, stored) for field in given]))
    added = [field for field in found if field.name not in stored.names]
    if added and not may_add:
        names = [field.name for field in added]
        close = did_you_mean(names[0], stored.names)
        raise WriteError(
            f"{table}: found the columns {list_some(map(repr, names), _SHOWN_COLUMNS)}, which the table does not have; "
            f"it has {list_some(stored.names, _SHOWN_COLUMNS)}",
            fix=Fix(f"{close}; or {_EVOLVE.python}" if close else _EVOLVE.python, command=close),
        )
    for field in stored:
        if field.name not in found.names:
            if not field.nullable:
                raise WriteError(
                    f"{table}: found no column {field.name!r}, expected it: the table allows no nulls there"
                )
            continue
        here, there = found.field(field.name).type, plain_type(field.type)
        if not _fits(here, there):
            raise WriteError(
                f"{table}: column {field.name!r}: found {given.field(field.name).type}, expected {there} as in the "
                "table",
                fix=Fix("cast the column with MapTable", command="write to another table"),
            )
    return added


def check_keys(table: str, keys: Sequence[str], schema: pa.Schema) -> None:
    """Raise unless the columns can identify rows."""
    for key in keys:
        if key not in schema.names:
            raise WriteError(
                f"{table}: found no column {key!r} for keys=, expected one of {list_some(schema.names, _SHOWN_COLUMNS)}"
            )
        if types.is_nested(kind := schema.field(key).type):
            raise WriteError(f"{table}: found {kind} in the key {key!r}, expected texts, numbers or times")


def _of_stored(field: pa.Field, stored: pa.Schema) -> pa.Field:
    """Return a column without any value as the table has it: it fits each that may have nulls."""
    is_empty = types.is_null(field.type) and field.name in stored.names
    return field.with_type(stored.field(field.name).type) if is_empty else field


def _fits(found: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether all values of a type that lakes have can be stored as another."""
    if found == expected or (types.is_nested(found) and types.is_nested(expected) and found.equals(expected)):
        return True
    if types.is_integer(found) and types.is_integer(expected):
        return True  # each value is checked
    if types.is_floating(found) and types.is_floating(expected):
        return found.bit_width <= expected.bit_width
    if types.is_decimal128(found) and types.is_decimal128(expected):
        return found.scale == expected.scale and found.precision <= expected.precision
    if types.is_list(found) and types.is_list(expected):
        return _fits(found.value_type, expected.value_type)
    if types.is_map(found) and types.is_map(expected):
        return _fits(found.key_type, expected.key_type) and _fits(found.item_type, expected.item_type)
    if types.is_struct(found) and types.is_struct(expected):
        ours = {found.field(at).name: found.field(at).type for at in range(found.num_fields)}
        theirs = {expected.field(at).name: expected.field(at).type for at in range(expected.num_fields)}
        return list(ours) == list(theirs) and all(_fits(ours[name], theirs[name]) for name in ours)
    if types.is_timestamp(found) and types.is_timestamp(expected):
        return (found.tz is None) == (expected.tz is None)
    return bool(types.is_binary(found) and types.is_fixed_size_binary(expected))


def as_stored(table: str, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows with the columns of the table; those that they lack are null. Values that don't fit raise."""
    arrays: list[Any] = []
    for field in schema:
        if field.name not in batch.schema.names:
            arrays.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(field.name)
        if not field.nullable and column.null_count:
            raise WriteError(f"{table}: column {field.name!r} has nulls, which the table does not allow")
        arrays.append(_cast(table, field, column))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(table: str, field: pa.Field, column: pa.Array) -> pa.Array:
    if column.type == field.type:
        return column
    try:
        plain = plain_type(column.type)
        return (column if column.type == plain else column.cast(plain)).cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise WriteError(
            f"{table}: column {field.name!r}: found {column.type} with a value that {field.type} can't hold: {error}"
        ) from error
