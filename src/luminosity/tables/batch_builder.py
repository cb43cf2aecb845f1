"""Build record batches from rows, all with the same columns."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NoReturn

import apache_beam as beam
import pyarrow as pa

from luminosity._shared.text import shorten_repr
from luminosity.core import ELEMENT_AT_FAULT
from luminosity.errors import Fix, TableError
from luminosity.tables.from_python import array_of, first_failing, fits, has_open_type, inferred
from luminosity.tables.types import fields_of, to_schema

__all__ = ["BatchBuilder"]

_SHOWN_CHARACTERS = 200  # of a row or value in a message: enough to recognise it
_TOO_MUCH = "more than one array of Arrow can hold"
_NOT_AN_ARRAY = (pa.ArrowException, ValueError, TypeError, OverflowError)
_ADD_OR_DROP = Fix("add the column to the schema, or leave it out")


class BatchBuilder:
    """Builds batches from rows. Columns that are not given are inferred from the first rows, and stay the same.

    >>> builder = BatchBuilder(schema=None, row_type=None)
    >>> builder.build([{"a": 1}, {"b": "x"}]).to_pylist()
    [{'a': 1, 'b': None}, {'a': None, 'b': 'x'}]
    >>> builder.build([{"a": 2, "b": 3}])
    Traceback (most recent call last):
    luminosity.errors.TableError: column 'b': found 3 (int), expected string as in the rows before...

    Args:
        schema: the columns, if the user gives them.
        row_type: the type of the rows, which may tell the columns.
    """

    def __init__(self, schema: Any, row_type: Any) -> None:
        self._schema = to_schema(schema)
        fields = fields_of(row_type) if self._schema is None else None
        self._given: dict[str, pa.DataType] = {name: kind for name, kind in (fields or {}).items() if kind is not None}
        self._names: dict[str, None] | None = None if fields is None else dict.fromkeys(fields)
        self._is_closed = fields is not None
        self._inferred: dict[str, pa.DataType] = {}

    def build(self, rows: list[Any]) -> pa.RecordBatch:
        """Return one batch. ``TableError`` names the row and column at fault; ``OverflowError`` asks for fewer rows."""
        columns = _columns(rows)
        schema = self._schema
        if schema is None:
            return self._built(rows, columns)
        self._check_names(rows, columns, dict.fromkeys(schema.names))
        nulls = [None] * len(rows)
        arrays = [self._given_array(rows, field, columns.get(field.name, nulls)) for field in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _built(self, rows: list[Any], columns: dict[str, list[Any]]) -> pa.RecordBatch:
        names = self._names if self._names is not None else dict.fromkeys(columns)
        if not names:
            raise TableError(f"found {len(rows)} rows without columns, expected at least one column")
        self._check_names(rows, columns, names)
        nulls = [None] * len(rows)
        arrays: list[pa.Array] = []
        for name in names:
            values = columns.get(name, nulls)
            if name in self._given:
                arrays.append(self._given_array(rows, pa.field(name, self._given[name]), values))
            else:
                arrays.append(self._inferred_array(rows, name, values))
        self._names = names
        return pa.RecordBatch.from_arrays(arrays, names=list(names))

    def _given_array(self, rows: list[Any], field: pa.Field, values: list[Any]) -> pa.Array:
        try:
            array = array_of(values, field.type)
        except pa.ArrowCapacityError as error:
            raise OverflowError(_TOO_MUCH) from error
        except _NOT_AN_ARRAY as error:
            at = first_failing(values, lambda some: array_of(some, field.type))
            _refuse(rows[at], field.name, f"found {_shown(values[at])}, expected {field.type}: {error}")
        if array.null_count and not field.nullable:
            at = next(index for index, value in enumerate(values) if value is None)
            _refuse(rows[at], field.name, f"found null, expected {field.type}: the schema does not allow nulls")
        return _whole(array)

    def _inferred_array(self, rows: list[Any], name: str, values: list[Any]) -> pa.Array:
        known = self._inferred.get(name)
        try:
            array = inferred(values)
        except pa.ArrowCapacityError as error:
            raise OverflowError(_TOO_MUCH) from error
        except _NOT_AN_ARRAY as error:
            at = first_failing(values, inferred)
            _refuse(
                rows[at],
                name,
                f"found {_shown(values[at])}, which does not fit the rows before: {error}",
                _pass_schema(name),
            )
        if known is None:
            if has_open_type(array.type):
                _refuse(
                    rows[0],
                    name,
                    f"nothing in {len(rows)} rows shows its type (so far: {array.type})",
                    _pass_schema(name),
                )
            self._inferred[name] = array.type
        elif array.type != known:
            array = self._as_before(rows, name, values, array, known)
        return _whole(array)

    def _as_before(
        self, rows: list[Any], name: str, values: list[Any], array: pa.Array, known: pa.DataType
    ) -> pa.Array:
        def attempt(some: list[Any]) -> pa.Array:
            if not fits(inferred(some).type, known):
                raise TableError(f"not {known}")
            return array_of(some, known)

        try:
            return attempt(values)
        except _NOT_AN_ARRAY:
            at = first_failing(values, attempt)
            _refuse(
                rows[at],
                name,
                f"found {_shown(values[at])}, expected {known} as in the rows before",
                _pass_schema(name),
            )

    def _check_names(self, rows: list[Any], columns: dict[str, list[Any]], names: dict[str, None]) -> None:
        for name, values in columns.items():
            if name in names:
                continue
            at = next((index for index, row in enumerate(rows) if name in _names(row)), 0)
            expected = f"expected the columns {', '.join(names)}"
            if self._schema is not None or self._is_closed:
                _refuse(rows[at], name, f"found {_shown(values[at])}, {expected}", _ADD_OR_DROP)
            _refuse(rows[at], name, f"found {_shown(values[at])}, {expected} as in the rows before", _pass_schema(name))


def _columns(rows: list[Any]) -> dict[str, list[Any]]:
    """Return the values by column; values that a row lacks are None."""
    kinds = set(map(type, rows))
    if len(kinds) == 1:
        kind = kinds.pop()
        names = getattr(kind, "_fields", None)
        if issubclass(kind, tuple) and names is not None:
            return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind)]
            return {name: [getattr(row, name) for row in rows] for name in names}
    dicts = [_as_dict(row) for row in rows]
    return {name: [row.get(name) for row in dicts] for name in dict.fromkeys(itertools.chain.from_iterable(dicts))}


def _as_dict(row: Any) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    if isinstance(row, beam.Row):
        return row.__dict__
    if isinstance(row, tuple) and hasattr(row, "_asdict"):
        return row._asdict()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    error = TableError(
        f"found an element of type {type(row).__name__}, expected a dict, a beam.Row, a NamedTuple or a dataclass"
    )
    setattr(error, ELEMENT_AT_FAULT, _short(row))
    raise error


def _names(row: Any) -> Any:
    return _as_dict(row).keys()


def _whole(array: pa.Array) -> pa.Array:
    if isinstance(array, pa.ChunkedArray):
        raise OverflowError(_TOO_MUCH)
    return array


def _refuse(row: Any, name: str, message: str, fix: Fix | None = None) -> NoReturn:
    error = TableError(f"column {name!r}: {message}; the row is {_short(row)}", fix=fix)
    setattr(error, ELEMENT_AT_FAULT, _short(row))
    raise error from None


def _shown(value: Any) -> str:
    return f"{_short(value)} ({type(value).__name__})"


def _short(value: Any) -> str:
    return shorten_repr(value, _SHOWN_CHARACTERS)


def _pass_schema(name: str) -> Fix:
    """Return the remedy for a type that was inferred from the first rows."""
    return Fix(f"pass the type: TableFromRows(schema=pa.schema([..., ({name!r}, pa.<type>())]))")
