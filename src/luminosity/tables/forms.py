"""Restore the types of columns that frames return in another form."""

from __future__ import annotations

import pyarrow as pa

from luminosity.errors import Fix, TableError
from luminosity.tables.from_python import has_open_type
from luminosity.tables.types import is_any_list

__all__ = ["with_original_types"]


def with_original_types(result: pa.RecordBatch, given: pa.Schema, schema: pa.Schema | None, who: str) -> pa.RecordBatch:
    """Return a frame's columns with the types of the columns that it was given, if only the form of the type differs.

    For example, pandas turns fixed-size lists into lists, and polars turns strings into large strings.

    >>> vectors = pa.schema([("v", pa.list_(pa.float64(), 2))])
    >>> with_original_types(pa.record_batch({"v": [[0.5, 1.0]]}), vectors, None, "f").schema.types
    [FixedSizeListType(fixed_size_list<item: double>[2])]
    """
    fields: list[pa.Field] = []
    arrays: list[pa.Array] = []
    for field, array in zip(result.schema, result.columns, strict=True):
        if schema is None:
            array = _as_given(array, given.field(field.name).type if field.name in given.names else None)
            is_as_given = field.name in given.names and array.type == given.field(field.name).type
            if has_open_type(array.type) and result.num_rows and not is_as_given:
                raise TableError(
                    f"{who}: nothing in {result.num_rows} rows shows the type of the new column {field.name!r} "
                    f"(found {array.type})",
                    fix=Fix("pass MapTable(..., schema=pa.schema([...]))"),
                )
        fields.append(pa.field(field.name, array.type))
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _as_given(array: pa.Array, given: pa.DataType | None) -> pa.Array:
    if array.type == given:
        return array
    if given is not None and (pa.types.is_null(array.type) or _form(array.type) == _form(given)):
        try:
            return array.cast(given)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            pass  # Lists have another length now, or decimals more digits: keep the new type.
    small = _small(array.type)
    return array if small == array.type else array.cast(small)


def _form(kind: pa.DataType) -> object:
    """Return a value that is equal for types that hold the same values."""
    if pa.types.is_dictionary(kind):
        return "dictionary", _form(kind.value_type)
    if pa.types.is_decimal(kind):
        return "decimal"
    if pa.types.is_time(kind):
        return "time"
    if pa.types.is_map(kind):
        return "map", _form(kind.key_type), _form(kind.item_type)
    if is_any_list(kind):
        return "list", _form(kind.value_type)
    if pa.types.is_struct(kind):
        return "struct", tuple((field.name, _form(field.type)) for field in kind)
    return _small(kind)


def _small(kind: pa.DataType) -> pa.DataType:
    """Return the usual type for a large one. polars has only large strings and lists; other libraries prefer these."""
    if pa.types.is_large_string(kind) or str(kind) == "string_view":
        return pa.string()
    if pa.types.is_large_binary(kind) or str(kind) == "binary_view":
        return pa.binary()
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(_small(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _small(field.type)) for field in kind])
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _small(kind.value_type), kind.ordered)
    return kind
