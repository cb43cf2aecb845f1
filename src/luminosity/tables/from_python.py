"""Convert Python values to Arrow, one column at a time, without losing anything."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.utils.timestamp import Timestamp

from luminosity.errors import TableError
from luminosity.tables.types import DECIMAL, is_any_list

__all__ = ["array_of", "first_failing", "fits", "has_open_type", "inferred"]

_AS_THEY_ARE = {
    *(type(None), bool, int, float, str, bytes, Decimal),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, np.ndarray),
}


def array_of(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return the values as an array of this type; raise if a value can't be converted without loss.

    >>> array_of([1, None, 2.0], pa.int32()).to_pylist()
    [1, None, 2]
    >>> array_of([1.5], pa.int32())
    Traceback (most recent call last):
    luminosity.errors.TableError: 1.5 is not a whole number
    """
    values = _plain_column(values)
    _check(values, kind)
    return pa.array(values, kind)


def inferred(values: list[Any]) -> pa.Array:
    """Return the values as an array of the type that they show.

    Decimals and times with a zone get the same type in all columns, whatever their digits and zones.

    >>> inferred([Decimal("1.5"), None]).type, inferred([1, 2.5]).type
    (Decimal128Type(decimal128(38, 9)), DataType(double))
    """
    values = _plain_column(values)
    array = pa.array(values)
    kind = _settled(array.type)
    return array if kind == array.type else pa.array(values, kind)


def has_open_type(kind: pa.DataType) -> bool:
    """Return whether a type is null or contains null, because no value has shown the type yet.

    >>> has_open_type(pa.array([[], None]).type)
    True
    """
    return pa.types.is_null(kind) or any(has_open_type(kind.field(index).type) for index in range(kind.num_fields))


def fits(found: pa.DataType, known: pa.DataType) -> bool:
    """Return whether values that show the type ``found`` fit into ``known`` without loss.

    >>> fits(pa.int64(), pa.float64()), fits(pa.float64(), pa.int64())
    (True, False)
    """
    if found == known or pa.types.is_null(found):
        return True
    if pa.types.is_list(found) and pa.types.is_list(known):
        return fits(found.value_type, known.value_type)
    if pa.types.is_struct(found) and pa.types.is_struct(known):
        names = {field.name: field.type for field in known}
        return all(field.name in names and fits(field.type, names[field.name]) for field in found)
    return pa.types.is_integer(found) and pa.types.is_float64(known)


def plain(value: Any) -> Any:
    """Return a value as pyarrow takes it: structs as dicts, times as datetimes.

    >>> plain([Timestamp(0)])
    [datetime.datetime(1970, 1, 1, 0, 0, tzinfo=datetime.timezone.utc)]
    """
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, list):
        first = next((item for item in value if item is not None), None)  # All items of a list have the same type.
        return value if type(first) in _AS_THEY_ARE else [plain(item) for item in value]
    if isinstance(value, Timestamp):
        return datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc) + datetime.timedelta(
            microseconds=value.micros
        )
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, beam.Row):
        return {name: plain(item) for name, item in value.as_dict().items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        items = [plain(item) for item in value]
        names = getattr(value, "_fields", None)  # A named tuple is a struct, not a list.
        return tuple(items) if names is None else dict(zip(names, items, strict=True))
    if isinstance(value, set | frozenset):
        return [plain(item) for item in value]
    return value


def _plain_column(values: list[Any]) -> list[Any]:
    return values if set(map(type, values)) <= _AS_THEY_ARE else [plain(value) for value in values]


def _check(values: list[Any], kind: pa.DataType) -> None:
    """Raise for values that pyarrow would change silently.

    These are fractions in integers, unknown fields of structs, the time of day in dates, and texts in place of lists.
    """
    if pa.types.is_date(kind):
        for day in values:
            if isinstance(day, datetime.datetime) and day.time() != datetime.time():
                raise TableError(f"{day} is not only a date, it has a time")
    if is_any_list(kind) and any(isinstance(value, str) for value in values):
        raise TableError("a text is not a list")
    if pa.types.is_integer(kind):
        for number in values:
            if isinstance(number, float | np.floating) and not float(number).is_integer():
                raise TableError(f"{number} is not a whole number")
    elif pa.types.is_struct(kind):
        structs = [value for value in values if isinstance(value, dict)]
        names = {field.name for field in kind}
        extra = sorted(map(str, {name for struct in structs for name in struct} - names))
        if extra:
            raise TableError(f"has {', '.join(extra)}, which is not in the type")
        for field in kind:
            _check_if_needed([struct.get(field.name) for struct in structs], field.type)
    elif pa.types.is_map(kind):
        maps = [value for value in values if isinstance(value, dict)]
        _check_if_needed([item for value in maps for item in value.values()], kind.item_type)
    elif is_any_list(kind) and _may_lose(kind.value_type):
        lists = (value for value in values if value is not None)
        _check(list(itertools.chain.from_iterable(lists)), kind.value_type)


def _check_if_needed(values: list[Any], kind: pa.DataType) -> None:
    if _may_lose(kind):
        _check(values, kind)


def _may_lose(kind: pa.DataType) -> bool:
    """Return whether values of this type may be changed. Vectors of floats, the longest lists, never are: skip them."""
    if pa.types.is_integer(kind) or pa.types.is_struct(kind) or pa.types.is_date(kind) or is_any_list(kind):
        return True
    return any(_may_lose(kind.field(index).type) for index in range(kind.num_fields))


def _settled(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_decimal(kind):
        return DECIMAL
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_list(kind):
        return pa.list_(_settled(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _settled(field.type)) for field in kind])
    return kind


def first_failing(values: list[Any], attempt: Callable[[list[Any]], Any]) -> int:
    """Return the index of the first value at fault: an attempt on the values up to it fails, one before it works.

    An attempt on all values must fail.
    """
    good, bad = 0, len(values)  # An attempt on the first `good` values works, on the first `bad` it fails.
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            attempt(values[:middle])
            good = middle
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            bad = middle
    return bad - 1
