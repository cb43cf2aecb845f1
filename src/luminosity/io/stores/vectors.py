"""Read columns of vectors and check them: stores accept NaN silently, and never find such a point again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from luminosity.errors import StoreError

__all__ = ["VectorColumn", "read_vectors"]


@dataclass(frozen=True)
class VectorColumn:
    """The vectors of a column, one for each row; None where the row is null."""

    size: int | None
    """None if no row tells."""
    rows: list[list[float] | None]


def read_vectors(name: str, column: Any, row_name: Callable[[int], str]) -> VectorColumn:
    """Return the vectors of a column; ``row_name`` returns the name of a row in messages.

    >>> read_vectors("v", pa.array([[1, 2], None], pa.list_(pa.float32(), 2)), str)
    VectorColumn(size=2, rows=[[1.0, 2.0], None])
    """
    fixed = pa.types.is_fixed_size_list(column.type)
    if not (fixed or pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise StoreError(f"the vector column {name!r} is of type {column.type}, expected lists of numbers")
    places = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    present = column.drop_null()
    size = column.type.list_size if fixed else _common_size(name, present, places, row_name)
    rows: list[list[float] | None] = [None] * len(column)
    if not size or not len(present):
        return VectorColumn(size, rows)
    numbers = present.flatten().cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)  # Nulls become NaN.
    matrix = numbers.reshape(-1, size)
    bad = np.flatnonzero(~np.isfinite(matrix).all(axis=1))
    if len(bad):
        raise StoreError(
            f"the vector {name!r} of {row_name(int(places[bad[0]]))} has a number in it that is null, NaN, infinite or "
            "too large for float32, expected finite numbers"
        )
    for place, vector in zip(places.tolist(), matrix.tolist(), strict=True):
        rows[place] = vector
    return VectorColumn(size, rows)


def _common_size(name: str, present: Any, places: np.ndarray, row_name: Callable[[int], str]) -> int | None:
    if not len(present):
        return None
    sizes = pc.call_function("list_value_length", [present]).to_numpy(zero_copy_only=False)
    other = np.flatnonzero(sizes != sizes[0])
    if len(other):
        raise StoreError(
            f"the vector {name!r} of {row_name(int(places[other[0]]))} has {sizes[other[0]]} numbers, that of "
            f"{row_name(int(places[0]))} has {sizes[0]}; expected the same for all"
        )
    return int(sizes[0])
