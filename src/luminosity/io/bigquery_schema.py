"""Describe the columns of a table as BigQuery does."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from luminosity.errors import InvalidArgument, InvalidType

__all__ = ["bigquery_schema"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,299}")
# What a NUMERIC and a BIGNUMERIC hold at most: digits before and after the decimal point.
_NUMERIC = (29, 9)
_BIGNUMERIC = (38, 38)


def bigquery_schema(schema: pa.Schema) -> dict[str, Any]:
    """Return the columns of a table as ``beam.io.WriteToBigQuery(schema=...)`` takes them.

    >>> columns = [("id", pa.int64()), ("text", pa.string()), ("meaning", pa.list_(pa.float32(), 384))]
    >>> for field in bigquery_schema(pa.schema(columns))["fields"]:
    ...     print(field)
    {'name': 'id', 'type': 'INTEGER', 'mode': 'NULLABLE'}
    {'name': 'text', 'type': 'STRING', 'mode': 'NULLABLE'}
    {'name': 'meaning', 'type': 'FLOAT', 'mode': 'REPEATED'}

    Lists and vectors become ``REPEATED`` columns, structs become ``RECORD``, and a field that is not nullable becomes
    ``REQUIRED``. A time with a zone is a ``TIMESTAMP``, one without a zone a ``DATETIME``. The rows of
    ``RowsFromTable()`` fit the result.

    Args:
        schema: the ``schema`` of a ``pyarrow.Table``, a ``RecordBatch`` or a dataset.
    """
    if not isinstance(schema, pa.Schema):
        raise InvalidType(f"found {type(schema).__name__}, expected a pyarrow.Schema", fix="pass table.schema")
    return {"fields": _fields(list(schema), "")}


def _fields(fields: list[pa.Field], path: str) -> list[dict[str, Any]]:
    seen: dict[str, str] = {}
    for field in fields:
        if not _NAME.fullmatch(field.name):
            raise InvalidArgument(
                f"found a column named {path + field.name!r}, expected a name that BigQuery and Avro take: letters, "
                "digits and underscores, not beginning with a digit, at most 300 of them",
                fix="rename it with table.rename_columns(...)",
            )
        other = seen.get(field.name.lower())
        seen[field.name.lower()] = field.name
        if other is not None:
            raise InvalidArgument(
                f"found the columns {path + other!r} and {path + field.name!r}, expected names that differ in more "
                "than case",
                fix="rename one with table.rename_columns(...)",
            )
    return [_field(field, path) for field in fields]


def _field(field: pa.Field, path: str) -> dict[str, Any]:
    name, kind = path + field.name, _plain(field.type)
    mode = "NULLABLE" if field.nullable else "REQUIRED"
    if _is_list(kind):
        mode, kind = "REPEATED", _plain(kind.value_type)
        if _is_list(kind):
            raise InvalidType(
                f"column {name!r} has the type {field.type}, and BigQuery has no lists of lists",
                fix="make the inner list a struct with one field, or flatten it",
            )
    described = {"name": field.name, "type": _type_name(kind, name), "mode": mode}
    if pa.types.is_struct(kind):
        described["fields"] = _fields([kind.field(number) for number in range(kind.num_fields)], f"{name}.")
    return described


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of a dictionary or an extension type, such as a tensor."""
    while True:
        if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        elif isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        else:
            return kind


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _type_name(kind: pa.DataType, column: str) -> str:
    types = pa.types
    if types.is_boolean(kind):
        return "BOOLEAN"
    if types.is_integer(kind) and not types.is_uint64(kind):
        return "INTEGER"
    if types.is_floating(kind):
        return "FLOAT"
    if types.is_decimal(kind):
        return _decimal_name(kind, column)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "STRING"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return "BYTES"
    if types.is_fixed_size_binary(kind):
        return "BYTES"
    if types.is_date(kind):
        return "DATE"
    if types.is_time(kind):
        return "TIME"
    if types.is_timestamp(kind):
        return "TIMESTAMP" if kind.tz else "DATETIME"
    if types.is_struct(kind):
        return "RECORD"
    raise InvalidType(f"column {column!r} has the type {kind}, for which BigQuery has no type", fix=_advice(kind))


def _decimal_name(kind: pa.DataType, column: str) -> str:
    before, after = kind.precision - kind.scale, kind.scale
    for name, (most_before, most_after) in {"NUMERIC": _NUMERIC, "BIGNUMERIC": _BIGNUMERIC}.items():
        if before <= most_before and after <= most_after:
            return name
    raise InvalidType(
        f"column {column!r} has the type {kind}, and BigQuery's largest, BIGNUMERIC, has 38 digits before and 38 after "
        "the decimal point",
        fix="cast the column to decimal128(38, 9) or to float64",
    )


def _advice(kind: pa.DataType) -> str:
    if pa.types.is_uint64(kind):
        return "cast the column to int64, or to decimal128(20, 0) if it has larger numbers"
    if pa.types.is_map(kind):
        return "turn the maps into lists of structs with the fields key and value"
    if pa.types.is_null(kind):
        return "give the column the type that its values will have"
    return "cast the column to int64 or string"
