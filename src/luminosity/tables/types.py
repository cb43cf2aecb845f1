"""Convert the types of Python's rows to Arrow types, and back."""

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

from luminosity.errors import Fix, InvalidType

__all__ = ["DECIMAL", "arrow_type", "field_hints", "fields_of", "is_any_list", "is_row_class", "row_hint", "to_schema"]

DECIMAL = pa.decimal128(38, 9)
"""The type of a ``Decimal`` without a schema: values have different digits, but a column has one type."""

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
    """Return whether a type is a dataclass or a NamedTuple.

    >>> is_row_class(dict)
    False
    """
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or _is_named_tuple(kind))


def fields_of(kind: Any) -> dict[str, pa.DataType | None] | None:
    """Return the columns of rows of this type, with None for an open type; None if the type does not tell columns.

    >>> from typing import NamedTuple
    >>> Review = NamedTuple("Review", [("text", str), ("stars", Optional[int])])
    >>> fields_of(Review)
    {'text': DataType(string), 'stars': DataType(int64)}
    """
    hints = field_hints(kind)
    return None if hints is None else {name: arrow_type(hint) for name, hint in hints.items()}


def field_hints(kind: Any) -> dict[str, Any] | None:
    """Return the annotations of a dataclass, a NamedTuple, a TypedDict or a Beam Row; None for other types."""
    if isinstance(kind, RowTypeConstraint):
        # Beam keeps a user class's annotations as strings; the class itself can resolve them.
        if is_row_class(kind.user_type) and not kind.user_type.__name__.startswith("BeamSchema_"):
            return field_hints(kind.user_type)
        return dict(kind._fields)  # pyright: ignore[reportPrivateUsage]  # Beam has no public way.
    if not (is_row_class(kind) or typing.is_typeddict(kind)):
        return None
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except NameError:  # An annotation uses a name that is imported for type checkers only.
        hints = dict(kind.__annotations__)
    if dataclasses.is_dataclass(kind):
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return {name: hints[name] for name in getattr(kind, "_fields", hints)}


def arrow_type(hint: Any) -> pa.DataType | None:
    """Return the Arrow type of values with this annotation, or None if it does not tell.

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
    """Return the schema that a user gives as a ``pyarrow.Schema`` or as a class; None stays None."""
    if schema is None or isinstance(schema, pa.Schema):
        return schema
    fields = fields_of(schema)
    if fields is None:
        raise InvalidType(
            f"found schema={schema!r}, expected a pyarrow.Schema, or a dataclass, NamedTuple or TypedDict class"
        )
    unknown = [name for name, kind in fields.items() if kind is None]
    if unknown:
        raise InvalidType(
            f"the annotations of {', '.join(unknown)} in {schema.__name__} do not tell a type of Arrow",
            fix=Fix(
                "annotate them as in Annotated[list[float], pa.list_(pa.float32(), 384)], or pass a pyarrow.Schema"
            ),
        )
    return pa.schema(list(fields.items()))


def row_hint(schema: pa.Schema) -> Any:
    """Return Beam's type of Rows with these columns, for schema-aware transforms.

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
    (pa.types.is_timestamp, Timestamp),  # Beam's schemas have no datetime.
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
    """Return whether a type is a list, a large list, or a fixed-size list (a vector).

    >>> is_any_list(pa.list_(pa.float32(), 8))
    True
    """
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_fixed_binary(kind: pa.DataType) -> bool:
    return pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")
