"""Turns columns of a record batch into a matrix of numbers, and tells which rows can't be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import DriftError
from luminosity.tables.types import is_any_list

__all__ = ["Columns", "column_of", "matrix_of"]

Columns = str | Sequence[str]
"""A column of vectors, or several columns of numbers that form a vector together."""

_SHOWN_COLUMNS = 20  # names of columns in a message


def matrix_of(batch: pa.RecordBatch, columns: Columns) -> tuple[Any, dict[int, str]]:
    """Return a row of numbers for each row of the batch, and what is wrong with unusable rows, by their position.

    A column holds vectors or numbers; several columns of numbers form a vector together.

    >>> matrix_of(pa.record_batch({"v": [[1.0, 2.0], None]}), "v")
    (array([[1., 2.],
           [0., 0.]]), {1: 'is null'})
    >>> matrix_of(pa.record_batch({"age": [40, 30], "member": [True, None]}), ["age", "member"])
    (array([[40.,  1.],
           [ 0.,  0.]]), {1: 'is null'})
    """
    names = [columns] if isinstance(columns, str) else list(columns)
    arrays = [column_of(batch, name) for name in names]
    if len(arrays) == 1 and is_any_list(arrays[0].type):
        return _vectors(names[0], arrays[0])
    bad: dict[int, str] = {}
    for name, array in zip(names, arrays, strict=True):
        if not _is_number(array.type):
            expected = (
                "numbers or vectors of numbers" if len(names) == 1 else "numbers, because there are several columns"
            )
            raise DriftError(f"the column {name!r} holds {array.type}, expected {expected}")
        for place in _places(array.is_null()):
            bad.setdefault(place, "is null")
    matrix = np.stack([_numbers(array) for array in arrays], axis=1)
    matrix[list(bad)] = 0
    return matrix, bad


def column_of(batch: pa.RecordBatch, name: str) -> Any:
    """Return a column of the batch, with dictionary-encoded values decoded."""
    if name not in batch.schema.names:
        names = batch.schema.names
        raise DriftError(
            f"found no column {name!r}, "
            + (f"expected one of {list_some(names, _SHOWN_COLUMNS)}" if names else "the table has no columns"),
            fix=did_you_mean(name, names) or None,
        )
    column = batch.column(name)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _vectors(name: str, column: Any) -> tuple[Any, dict[int, str]]:
    if not _is_number(column.type.value_type):
        raise DriftError(f"the column {name!r} holds {column.type}, expected vectors of numbers")
    bad = dict.fromkeys(_places(column.is_null()), "is null")
    sizes = pc.call_function("list_value_length", [column]).to_numpy(zero_copy_only=False)
    there = [place for place in range(len(column)) if place not in bad] if bad else range(len(column))
    if not there:
        fixed = column.type.list_size if pa.types.is_fixed_size_list(column.type) else 0
        return np.zeros((len(column), fixed)), bad
    width = int(sizes[there[0]])
    if not pa.types.is_fixed_size_list(column.type):
        bad.update(
            (place, f"has {int(sizes[place])} numbers, others have {width}")
            for place in map(int, np.flatnonzero(sizes != width))
            if place not in bad
        )
    good = np.ones(len(column), dtype=bool)
    good[list(bad)] = False
    kept = column if good.all() else column.filter(pa.array(good))
    numbers = _numbers(kept.flatten()).reshape(-1, width)
    if good.all():
        return numbers, bad
    matrix = np.zeros((len(column), width), dtype=numbers.dtype)
    matrix[good] = numbers
    return matrix, bad


def _numbers(array: Any) -> Any:
    """Return numbers, with NaN for null; later checks find NaN."""
    numbers = array.to_numpy(zero_copy_only=False)
    return numbers.astype(np.float64) if numbers.dtype == object else numbers


def _places(mask: Any) -> list[int]:
    return np.flatnonzero(mask.to_numpy(zero_copy_only=False)).tolist()


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
