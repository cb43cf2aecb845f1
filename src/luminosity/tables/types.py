"""What Python's types of rows are in Arrow, and the other way."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Optional

import numpy as np
import pyarrow as pa
from apache_beam.typehints import typehints
from apache_beam.typehints.native_type_compatibility import convert_to_python_type
from apache_beam.typehints.row_type import RowTypeConstraint
from apache_beam.utils.timestamp import Timestamp

__all__ = ["DECIMAL", "arrow_type", "field_hints", "fields_of", "is_any_list", "is_row_class", "row_hint", "to_schema"]

DECIMAL = pa.decimal128(38, 9)
"""What a `Decimal` is unless a schema says more: numbers of rows differ in their digits, those of a column must not."""

_SIMPLE: dict[Any, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    Decimal: DECIMAL,
    datetime.date: pa.date32(),
    datetime.datetime: pa.timestamp("us", "UTC"),
    datetime.time: pa.time64("us"),
    datetime.timedelta: pa.duration("us"),
    Timestamp: pa.timestamp("us", "UTC"),
}
_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Set)
_MAPS = (dict, collections.abc.Mapping)


def is_row_class(kind: Any) -> bool:
    """Whether it is a dataclass or a NamedTuple.

    >>> is_row_class(dict)
    False
    """
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or _is_named_tuple(kind))


def fields_of(kind: Any) -> dict[str, pa.DataType | None] | None:
    """The columns that rows of this type have, and None for those whose type it leaves open; None: it does not tell.

    >>> from typing import NamedTuple
    >>> Review = NamedTuple("Review", [("text", str), ("stars", Optional[int])])
    >>> fields_of(Review)
    {'text': DataType(string), 'stars': DataType(int64)}
    """
    hints = field_hints(kind)
    return None if hints is None else {name: arrow_type(hint) for name, hint in hints.items()}


def field_hints(kind: Any) -> dict[str, Any] | None:
    """The annotations of a dataclass, a NamedTuple, a TypedDict, or of what Beam knows of a Row."""
    if isinstance(kind, RowTypeConstraint):
        # Of a user's class, Beam keeps annotations that are strings as they are; the class knows what they mean.
        if is_row_class(kind.user_type) and not kind.user_type.__name__.startswith("BeamSchema_"):
            return field_hints(kind.user_type)
        return dict(kind._fields)  # pyright: ignore[reportPrivateUsage]  # There is no public way.
    if not (is_row_class(kind) or typing.is_typeddict(kind)):
        return None
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except NameError:  # An annotation names what was imported for type checkers alone.
        hints = dict(kind.__annotations__)
    if dataclasses.is_dataclass(kind):
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return {name: hints[name] for name in getattr(kind, "_fields", hints)}


def arrow_type(hint: Any) -> pa.DataType | None:
    """What values of this type are in Arrow; None: it does not tell.

    >>> arrow_type(Optional[list[float]]), arrow_type(typing.Annotated[list[float], pa.list_(pa.float32(), 8)])
    (ListType(list<item: double>), FixedSizeListType(fixed_size_list<item: float>[8]))
    """
    fields = fields_of(hint)
    if fields is not None:
        known = {name: kind for name, kind in fields.items() if kind is not None}
        return pa.struct(list(known.items())) if len(known) == len(fields) else None
    if isinstance(hint, typehints.TypeConstraint):
        hint = convert_to_python_type(hint)
    for note in getattr(hint, "__metadata__", ()):
        if isinstance(note, pa.DataType):
            return note
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return arrow_type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        kinds = [argument for argument in arguments if argument is not type(None)]
        return arrow_type(kinds[0]) if len(kinds) == 1 else None
    if origin in _LISTS:
        kinds = {argument for argument in arguments if argument is not ...}
        inner = arrow_type(kinds.pop()) if len(kinds) == 1 else None
        return None if inner is None else pa.list_(inner)
    if origin in _MAPS and len(arguments) == 2:
        key, value = arrow_type(arguments[0]), arrow_type(arguments[1])
        return None if key is None or value is None else pa.map_(key, value)
    if isinstance(hint, type) and issubclass(hint, np.number | np.bool_):
        return pa.from_numpy_dtype(hint)
    return _SIMPLE.get(hint) if isinstance(hint, collections.abc.Hashable) else None


def to_schema(schema: Any) -> pa.Schema | None:
    """A schema as users give it: one of Arrow's, or a class that has all it takes."""
    if schema is None or isinstance(schema, pa.Schema):
        return schema
    fields = fields_of(schema)
    if fields is None:
        raise TypeError(
            f"found schema={schema!r}, expected a pyarrow.Schema, or a dataclass, NamedTuple or TypedDict class"
        )
    unknown = [name for name, kind in fields.items() if kind is None]
    if unknown:
        raise TypeError(
            f"the types of {', '.join(unknown)} in {schema.__name__} do not tell one of Arrow's; "
            "annotate them, as in Annotated[list[float], pa.list_(pa.float32(), 384)], or give a pyarrow.Schema"
        )
    return pa.schema(list(fields.items()))


def row_hint(schema: pa.Schema) -> Any:
    """Beam's type of Rows with these columns: what its schema-aware transforms need to know.

    >>> row_hint(pa.schema([("text", pa.string())]))
    Row(text=typing.Optional[str])
    """
    return RowTypeConstraint.from_fields([(field.name, _hint(field)) for field in schema])


_HINTS: list[tuple[Callable[[pa.DataType], bool], Any]] = [
    (pa.types.is_boolean, bool),
    (pa.types.is_integer, int),
    (pa.types.is_floating, float),
    (lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind), str),
    (lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or _is_fixed_binary(kind), bytes),
    (pa.types.is_decimal, Decimal),
    (pa.types.is_date, datetime.date),
    (pa.types.is_timestamp, Timestamp),  # A datetime would have no place in Beam's schemas.
]


def _hint(field: pa.Field) -> Any:
    hint = _type_hint(field.type)
    return Optional[hint] if field.nullable and hint is not Any else hint  # noqa: UP045  # of a Beam type, `|` would fail


def _type_hint(kind: pa.DataType) -> Any:
    if pa.types.is_dictionary(kind):
        return _type_hint(kind.value_type)
    if pa.types.is_struct(kind):
        return row_hint(pa.schema(list(kind)))
    if pa.types.is_map(kind):
        return Mapping[_type_hint(kind.key_type), _hint(kind.item_field)]
    if is_any_list(kind):
        return Sequence[_hint(kind.value_field)]
    return next((hint for holds, hint in _HINTS if holds(kind)), Any)


def is_any_list(kind: pa.DataType) -> bool:
    """Of any length, long ones too, or all of one length: vectors.

    >>> is_any_list(pa.list_(pa.float32(), 8))
    True
    """
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_fixed_binary(kind: pa.DataType) -> bool:
    return pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")
