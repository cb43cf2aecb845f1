"""Make rows from record batches: dicts, Beam Rows, or instances of a class."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import types
import typing
from collections.abc import Callable
from typing import Any, TypeAlias

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.utils.timestamp import Timestamp

from luminosity.errors import Fix, InvalidType, TableError
from luminosity.tables.schemas import conform
from luminosity.tables.types import field_hints, is_any_list, is_row_class

__all__ = ["RowMaker"]
Maker: TypeAlias = Callable[[Any], Any]
"""Converts a value that ``python_values`` returned, never None, to the type that a field wants."""
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_MICROSECOND = datetime.timedelta(microseconds=1)


def python_values(array: pa.Array) -> list[Any]:
    """Return the values of an array: vectors as lists, structs and maps as dicts, times as datetimes.

    >>> python_values(pa.array([[0.5, 1.5], None], pa.list_(pa.float32(), 2)))
    [[0.5, 1.5], None]
    >>> python_values(pa.array([{"a": 1}], pa.map_(pa.string(), pa.int8())))
    [{'a': 1}]
    """
    kind = array.type
    if pa.types.is_dictionary(kind):
        return python_values(array.dictionary_decode())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return _numbers(array)
    if pa.types.is_struct(kind):
        # flatten() makes the fields null where the struct is null; they may have any value there.
        columns = [python_values(child) for child in array.flatten()]
        names = [field.name for field in kind]
        if not columns:
            return _with_nulls([{} for _ in range(len(array))], array)
        return _with_nulls([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)], array)
    if pa.types.is_map(kind):
        pairs = zip(_cut(array, array.keys), _cut(array, array.items), strict=True)
        return _with_nulls([dict(zip(keys, items, strict=True)) for keys, items in pairs], array)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _with_nulls(_cut(array, array.values), array)
    if pa.types.is_fixed_size_list(kind) and kind.list_size:
        return _vectors(array, kind.list_size)
    return _in_microseconds(array).to_pylist()


def _numbers(array: pa.Array) -> list[Any]:
    if not array.null_count:
        return array.to_numpy(zero_copy_only=False).tolist()
    zero = pa.scalar(0).cast(array.type)
    return _with_nulls(array.fill_null(zero).to_numpy(zero_copy_only=False).tolist(), array)


def _vectors(array: pa.Array, size: int) -> list[Any]:
    numbers = array.flatten()  # This leaves out the numbers of null lists.
    if pa.types.is_floating(numbers.type) and not numbers.null_count:
        lists = numbers.to_numpy(zero_copy_only=False).reshape(-1, size).tolist()
    else:
        flat = python_values(numbers)
        lists = [flat[start : start + size] for start in range(0, len(flat), size)]
    if not array.null_count:
        return lists
    rest = iter(lists)
    return [next(rest) if is_valid else None for is_valid in array.is_valid().to_pylist()]


def _cut(array: pa.Array, values: pa.Array) -> list[list[Any]]:
    """Cut ``values``, the items of all lists, into a list for each."""
    offsets = array.offsets.to_numpy().tolist()
    start = offsets[0]
    flat = python_values(values.slice(start, offsets[-1] - start))
    return [flat[begin - start : end - start] for begin, end in itertools.pairwise(offsets)]


def _with_nulls(values: list[Any], array: pa.Array) -> list[Any]:
    if array.null_count:
        for index in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)):
            values[index] = None
    return values


def _in_microseconds(array: pa.Array) -> pa.Array:
    """Cast to microseconds, which Python's times have. The cast raises if it would lose nanoseconds."""
    kind = array.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return array.cast(pa.timestamp("us", kind.tz))
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return array.cast(pa.duration("us"))
    return array.cast(pa.time64("us")) if kind == pa.time64("ns") else array


def maker_for_row(kind: pa.DataType) -> Maker | None:
    """Return the conversion for a field of a Beam Row, where structs are Rows and times are Beam's; None if none."""
    if pa.types.is_timestamp(kind):
        return _beam_time
    if pa.types.is_struct(kind):
        makers = {field.name: maker_for_row(field.type) for field in kind}
        return lambda value: beam.Row(**_made(value, makers))
    if pa.types.is_map(kind):
        return _of_each_value(maker_for_row(kind.item_type))
    if is_any_list(kind):
        return _of_each(maker_for_row(kind.value_type), list)
    return None


def maker_for_annotation(hint: Any) -> Maker | None:
    """Return the conversion for a field of a class with this annotation; None if none is needed."""
    if hint is Timestamp:
        return _beam_time
    if is_row_class(hint):
        return _class_maker(hint)
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is np.ndarray:
        return np.asarray
    if origin is typing.Annotated:
        return maker_for_annotation(arguments[0])
    if origin in (typing.Union, types.UnionType):
        kinds = [argument for argument in arguments if argument is not type(None)]
        return maker_for_annotation(kinds[0]) if len(kinds) == 1 else None
    inner = maker_for_annotation(arguments[0]) if arguments else None
    if origin in (tuple, set, frozenset):
        return _of_each(inner, origin)
    if origin is dict:
        return _of_each_value(maker_for_annotation(arguments[1]) if arguments else None)
    return _of_each(inner, list)


def _class_maker(kind: Any) -> Maker:
    hints = field_hints(kind) or {}
    makers = {name: maker_for_annotation(hint) for name, hint in hints.items() if name in constructor_fields(kind)}
    return lambda value: kind(**_made({name: value[name] for name in makers if name in value}, makers))


def constructor_fields(kind: Any) -> dict[str, bool]:
    """Return the parameters of a dataclass or NamedTuple, and whether each has a default."""
    if dataclasses.is_dataclass(kind):
        unset = dataclasses.MISSING
        return {
            field.name: field.default is not unset or field.default_factory is not unset
            for field in dataclasses.fields(kind)
            if field.init
        }
    return {name: name in kind._field_defaults for name in kind._fields}


def _beam_time(value: datetime.datetime) -> Timestamp:
    """Return Beam's timestamp. A time without a zone is in UTC, as in Arrow."""
    utc = value if value.tzinfo is not None else value.replace(tzinfo=datetime.timezone.utc)
    return Timestamp(micros=(utc - _EPOCH) // _MICROSECOND)


def _made(value: dict[str, Any], makers: dict[str, Maker | None]) -> dict[str, Any]:
    return {name: _make(makers[name], item) for name, item in value.items()}


def _make(maker: Maker | None, value: Any) -> Any:
    return value if maker is None or value is None else maker(value)


def _of_each(maker: Maker | None, container: Callable[[Any], Any]) -> Maker | None:
    if maker is None:
        return None if container is list else container
    return lambda values: container([_make(maker, value) for value in values])


def _of_each_value(maker: Maker | None) -> Maker | None:
    return None if maker is None else lambda value: {key: _make(maker, item) for key, item in value.items()}


class RowMaker:
    """Makes rows: dicts, Beam Rows, or instances of a dataclass or NamedTuple.

    >>> RowMaker(dict).rows(pa.record_batch({"text": ["a"], "vector": [[0.5]]}))
    [{'text': 'a', 'vector': [0.5]}]
    """

    def __init__(self, as_: Any, schema: pa.Schema | None = None) -> None:
        if as_ is not dict and as_ is not beam.Row and not is_row_class(as_):
            raise InvalidType(f"found as_={as_!r}, expected dict, beam.Row, or a dataclass or NamedTuple class")
        if schema is not None and as_ is not beam.Row:
            raise InvalidType(f"found schema= with as_={as_.__name__}, expected it only with beam.Row")
        self._as = as_
        self.schema = schema

    def rows(self, batch: pa.RecordBatch) -> list[Any]:
        """Return the rows of a batch, in order."""
        if self._as is dict:
            names, columns = batch.schema.names, [_values(batch, name, None) for name in batch.schema.names]
            return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        if self.schema is not None:
            batch = conform(batch, self.schema, "RowsFromTable(schema=)")
        makers = _row_makers(batch) if self._as is beam.Row else self._class_makers(batch)
        columns = [_values(batch, name, maker) for name, maker in makers.items()]
        return [self._as(**dict(zip(makers, row, strict=True))) for row in zip(*columns, strict=True)]

    def _class_makers(self, batch: pa.RecordBatch) -> dict[str, Maker | None]:
        fields = constructor_fields(self._as)
        missing = [name for name, has_default in fields.items() if not has_default and name not in batch.schema.names]
        if missing:
            raise TableError(
                f"found the columns {', '.join(batch.schema.names)}, expected also {', '.join(missing)}, "
                f"which {self._as.__name__} has no defaults for"
            )
        hints = field_hints(self._as) or {}
        return {name: maker_for_annotation(hints[name]) for name in fields if name in batch.schema.names}


def _row_makers(batch: pa.RecordBatch) -> dict[str, Maker | None]:
    return {field.name: maker_for_row(field.type) for field in batch.schema}


def _values(batch: pa.RecordBatch, name: str, maker: Maker | None) -> list[Any]:
    array = batch.column(name)
    try:
        values = python_values(array)
    except (pa.ArrowInvalid, ValueError, OverflowError) as error:
        raise TableError(
            f"column {name!r} of type {array.type} has values that Python can't hold: {error}",
            fix=Fix('cast the column first with MapTable, for example to timestamp("us") or to integers'),
        ) from error
    return values if maker is None else [None if value is None else maker(value) for value in values]
