"""Reads the columns of record batches and rows: classes, numbers, and the values that slices have."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import EvaluationError, Fix

__all__ = [
    "RowCollector",
    "batch_of_rows",
    "codes_of",
    "column_of",
    "is_boolean",
    "is_number",
    "is_text",
    "numbers_of",
    "plain_value",
    "roots_of",
    "row_as_dict",
]

_SHOWN_COLUMNS = 20  # names of columns in a message
_ROWS_AT_ONCE = 4096  # rows that are not in batches are collected up to here


def column_of(batch: pa.RecordBatch, name: str) -> Any:
    """Return a column, with dictionaries decoded and extension types as what they are stored as.

    ``outer.inner`` is the field of a column of structs, unless a column has this name.
    """
    names = batch.schema.names
    root, _, inner = name.rpartition(".")
    if name not in names and root and (root in names or "." in root):
        outer = column_of(batch, root)
        kind = outer.type
        fields = [kind.field(at).name for at in range(kind.num_fields)] if pa.types.is_struct(kind) else []
        return column_of(pa.RecordBatch.from_arrays(outer.flatten() if fields else [], names=fields), inner)
    if name not in names:
        raise _no_column(name, names)
    if names.count(name) > 1:
        raise EvaluationError(f"found {names.count(name)} columns {name!r}, expected one")
    column = batch.column(name)
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _no_column(name: str, names: Sequence[str]) -> EvaluationError:
    return EvaluationError(
        f"found no column {name!r}, "
        + (f"expected one of {list_some(names, _SHOWN_COLUMNS)}" if names else "the table has no columns"),
        fix=did_you_mean(name, names) or None,
    )


def roots_of(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns of a table that hold these columns, some of which may be fields of others.

    >>> roots_of(["label", "mood.label", "mood.score"], ["text", "label", "mood"])
    ['label', 'mood']
    """
    found: list[str] = []
    for column in columns:
        root = column
        while root not in names and "." in root:
            root = root.rpartition(".")[0]
        found.append(root)
    return list(dict.fromkeys(found))


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type holds texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view"


def is_boolean(kind: pa.DataType) -> bool:
    """Return whether a type holds True and False."""
    return pa.types.is_boolean(kind)


def is_number(kind: pa.DataType) -> bool:
    """Return whether a type holds numbers; True and False are none."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def numbers_of(column: Any, name: str) -> tuple[Any, Any]:
    """Return the numbers of a column, and a mask of those that are null, NaN or infinite (and 0 here)."""
    if not (is_number(column.type) or is_boolean(column.type) or pa.types.is_null(column.type)):
        raise EvaluationError(f"the column {name!r} holds {column.type}, expected numbers")
    if is_boolean(column.type):
        column = column.cast(pa.uint8())
    numbers = np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)
    is_missing = ~np.isfinite(numbers)  # to_numpy() gives NaN for null
    return (np.where(is_missing, 0.0, numbers) if is_missing.any() else numbers), is_missing


def codes_of(column: Any, name: str) -> tuple[Any, list[Any]]:
    """Return a number for each value, and the values: the number is the index of the value, which is None for null."""
    kind = column.type
    if pa.types.is_nested(kind):
        raise EvaluationError(f"the column {name!r} holds {kind}, expected texts, numbers or dates")
    if str(kind) in ("string_view", "binary_view"):
        column = column.cast(pa.large_string() if str(kind) == "string_view" else pa.large_binary())
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    encoded = column.dictionary_encode(null_encoding="encode")
    if pa.types.is_null(kind):
        return np.zeros(len(column), dtype=np.int64), [None]
    indices = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return indices, [plain_value(value) for value in encoded.dictionary.to_pylist()]


def plain_value(value: Any) -> Any:
    """Return a value as a key: whole numbers as ``int``, NaN as None.

    >>> plain_value(2.0), plain_value(Decimal("1.00")), plain_value(float("nan")), plain_value("a")
    (2, 1, None, 'a')
    """
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return int(value) if value.is_integer() else value
    return value


def batch_of_rows(rows: Sequence[Any], columns: Sequence[str] | None) -> pa.RecordBatch:
    """Return these columns of dicts, Beam Rows, NamedTuples or dataclasses; None takes all columns.

    >>> batch_of_rows([{"a": 1, "b": 2}, {"a": None}], ["a"]).to_pydict()
    {'a': [1, None]}
    """
    dicts = [row_as_dict(row) for row in rows]
    there = dict.fromkeys(name for row in dicts for name in row)
    names = list(there) if columns is None else roots_of(columns, list(there))
    for name in names:
        if name not in there:
            raise _no_column(name, list(there))
    arrays: list[Any] = []
    for name in names:
        values = [row.get(name) for row in dicts]
        try:
            arrays.append(pa.array(values))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise EvaluationError(
                f"column {name!r}: found values of different types ({error}), expected one type",
                fix=Fix("apply TableFromRows(schema) first"),
            ) from None
    if not arrays:
        return pa.RecordBatch.from_pylist([{}] * len(rows), schema=pa.schema([]))
    return pa.RecordBatch.from_arrays(arrays, names=names)


def row_as_dict(row: Any) -> Mapping[str, Any]:
    """Return the values of a dict, a Beam Row, a NamedTuple or a dataclass by their names."""
    if isinstance(row, Mapping):
        return row
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    if hasattr(row, "_asdict"):  # a NamedTuple, or a beam.Row
        return row._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    if type(row).__name__ == "Row" and type(row).__module__.startswith("apache_beam."):
        return row.__dict__
    raise EvaluationError(
        f"found an element of type {type(row).__name__}, expected a pyarrow.RecordBatch, a dict, a beam.Row, a "
        "NamedTuple or a dataclass"
    )


class RowCollector(ABC):
    """Collects record batches and rows, of which some thousand become a batch. Can be pickled."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        self._columns = columns
        self._pending: list[Any] = []

    @abstractmethod
    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch."""

    def add(self, element: Any) -> None:
        """Add a record batch, or one row: a dict, a Beam Row, a NamedTuple or a dataclass."""
        if isinstance(element, pa.RecordBatch):
            self.add_batch(element)
            return
        self._pending.append(element)
        if len(self._pending) >= _ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Add the rows that were collected so far."""
        if self._pending:
            rows, self._pending = self._pending, []
            self.add_batch(batch_of_rows(rows, self._columns))

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return dict(self.__dict__)
