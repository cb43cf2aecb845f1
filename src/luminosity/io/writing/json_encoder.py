"""Rows as JSON lines, which pyarrow reads but can't write."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute, types

from luminosity.errors import Fix, WriteError

__all__ = ["json_lines"]

pc: Any = compute  # It creates its functions on import, so type checkers see none.

_ROWS = 8192  # encoded at once: bounds the memory of intermediate texts
_TEXT = pa.large_string()


def json_lines(table: pa.Table) -> Iterator[pa.Buffer]:
    """Yield the rows as JSON lines, in chunks.

    Times are ISO 8601, decimals are texts, durations are numbers in their unit, NaN and infinity are null.

    >>> table = pa.table({"at": pa.array([0], pa.timestamp("s", "UTC")), "x": [[1.0, float("nan")]]})
    >>> b"".join(json_lines(table))
    b'{"at":"1970-01-01T00:00:00Z","x":[1.0,null]}\\n'
    """
    names = [f"{',' if number else '{'}{json.dumps(name)}:" for number, name in enumerate(table.column_names)]
    for batch in table.to_batches(max_chunksize=_ROWS):
        pieces: list[Any] = []
        for name, column in zip(names, batch.columns, strict=True):
            pieces += [pa.scalar(name, _TEXT), _texts(_plain(column))]
        rows = pc.binary_join_element_wise(*pieces, pa.scalar("}\n", _TEXT), pa.scalar("", _TEXT))
        yield _joined(rows)


def _joined(rows: pa.LargeStringArray) -> pa.Buffer:
    """Return the texts as one buffer: in a new array they are contiguous."""
    _, offsets, data = rows.buffers()
    return data.slice(0, int(np.frombuffer(offsets, np.int64)[len(rows)]))


def _texts(column: pa.Array) -> pa.Array:
    """Return each value as JSON. Numbers are converted column by column, other values one by one."""
    kind = column.type
    if types.is_integer(kind) or types.is_boolean(kind):
        return pc.fill_null(column.cast(_TEXT), "null")
    if types.is_floating(kind):
        texts = column.cast(_TEXT)
        # Readers would mistake a float column of whole numbers for integers.
        is_whole = pc.match_substring_regex(texts, "^-?[0-9]+$")
        tail = pc.if_else(is_whole, pa.scalar(".0", _TEXT), pa.scalar("", _TEXT))
        return pc.fill_null(pc.binary_join_element_wise(texts, tail, pa.scalar("", _TEXT)), "null")
    return pa.array([_encoded(value) for value in column.to_pylist(maps_as_pydicts="strict")], _TEXT)


def _encoded(value: Any) -> str:
    try:
        return _STRICT.encode(value)
    except ValueError:  # a NaN within a list or a struct
        return _STRICT.encode(_without_nan(value))


def _plain(column: pa.Array) -> pa.Array:
    """Convert a column to a type that the JSON encoder knows."""
    kind = column.type
    if types.is_dictionary(kind):
        return _plain(column.cast(kind.value_type))
    if types.is_floating(kind):
        column = column.cast(pa.float32()) if types.is_float16(kind) else column
        return pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
    if types.is_timestamp(kind):
        if kind.tz is None:
            return pc.strftime(column, format="%Y-%m-%dT%H:%M:%S")
        return pc.strftime(column.cast(pa.timestamp(kind.unit, "UTC")), format="%Y-%m-%dT%H:%M:%SZ")
    if types.is_date(kind) or types.is_time(kind) or types.is_decimal(kind):
        return column.cast(pa.string())
    if types.is_duration(kind):
        return column.cast(pa.int64())
    return column


def _within(value: Any) -> Any:
    """Convert a value inside a list or struct to one that the JSON encoder knows."""
    if isinstance(value, datetime.datetime):
        if value.tzinfo is not None:
            return value.astimezone(datetime.timezone.utc).replace(tzinfo=None).isoformat() + "Z"
        return value.isoformat()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise WriteError(
        f"found a value of type {type(value).__name__}, which JSON can't hold",
        fix=Fix("write Parquet, or cast the column first", command="write Parquet, such as OUT.parquet"),
    )


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    return [_without_nan(part) for part in value] if isinstance(value, list) else value


_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_within)
