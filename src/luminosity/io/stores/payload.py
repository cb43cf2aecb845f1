"""Convert columns to JSON values, which a store keeps beside the vectors."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

import pyarrow as pa

from luminosity.errors import StoreError

__all__ = ["json_values"]


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
    if isinstance(value, Decimal | UUID):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(key): _json_value(inner) for key, inner in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in cast("list[Any]", value)]
    raise StoreError(f"found a value of type {type(value).__name__} in the payload, which JSON can't hold")
