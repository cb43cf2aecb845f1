"""Columns of a table as rows of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from luminosity.errors import DriftError

__all__ = ["Vectors", "check_numbers", "check_usable", "vector_columns"]


_NUMBERS = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean, pa.types.is_decimal)
_SHOWN = 20  # names of columns in a message


def vector_columns(schema: pa.Schema) -> list[str]:
    """Those that hold lists of fractions."""
    return [field.name for field in schema if _is_list(field.type) and pa.types.is_floating(field.type.value_type)]


def check_numbers(chosen: pa.Schema, pattern: str, whole: Callable[[], pa.Schema]) -> None:
    """Of the columns that are to be compared; the whole table is asked for only to name others."""
    for field in chosen:
        if not _has_numbers(field.type):
            others = [each.name for each in whole() if _has_numbers(each.type)]
            instead = f"such are in {', '.join(others[:_SHOWN])}" if others else "no column has such"
            raise DriftError(
                f"{pattern}: column {field.name!r} holds {field.type}, expected vectors or numbers; {instead}"
            )


def _has_numbers(kind: Any) -> bool:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    kind = kind.value_type if _is_list(kind) else kind
    return any(is_such(kind) for is_such in _NUMBERS)


class Vectors:
    """The columns of batch after batch, side by side. All rows have the width of the first."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._widths: dict[str, tuple[int, str]] = {}

    def of(self, batch: pa.RecordBatch, file: str, first_row: int) -> tuple[Any, Any]:
        """A row for each row, NaN where a number is missing; and where the whole value is null."""
        parts = [self._part(name, batch.column(name), file, first_row) for name in self._columns]
        rows = parts[0][0] if len(parts) == 1 else np.concatenate([rows for rows, _ in parts], axis=1)
        return rows, np.logical_or.reduce([null for _, null in parts])

    def _part(self, name: str, values: Any, file: str, first_row: int) -> tuple[Any, Any]:
        values = values.storage if isinstance(values, pa.ExtensionArray) else values
        null = np.asarray(values.is_null())
        if not _is_list(values.type):
            return _numbers(values)[:, None], null
        lengths = np.asarray(pc.fill_null(pc.call_function("list_value_length", [values]), 0))
        if null.all():  # How wide they would be is not known yet; such rows are left out, or refused.
            return np.full((len(values), self._widths.get(name, (1, ""))[0]), np.nan, np.float32), null
        width, origin = self._widths.setdefault(name, (int(lengths[~null][0]), f"{file}, row {first_row}"))
        other = ~null & (lengths != width)
        if other.any():
            at = int(other.argmax())
            raise DriftError(
                f"{file}: row {first_row + at} (counted from 0) of column {name!r} has {lengths[at]} numbers, "
                f"expected {width} as before it ({origin}); perhaps these are vectors of another model"
            )
        flat = _numbers(values.flatten())
        rows = np.full((len(values), width), np.nan, flat.dtype)
        rows[~null] = flat.reshape(-1, width) if width else 0
        return rows, null


def check_usable(rows: Any, null: Any, columns: Sequence[str], file: str, first_row: int) -> Any:
    """Which rows are whole; an error that names the first that is not, unless ``columns`` is empty."""
    usable = ~null & np.isfinite(rows).all(axis=1)
    if columns and not usable.all():
        at = int((~usable).argmax())
        what = "null" if null[at] else "NaN or infinity"
        where = ", ".join(columns)
        raise DriftError(
            f"{file}: found {what} in row {first_row + at} (counted from 0) of {where}, expected numbers; "
            "--skip-missing leaves such rows out"
        )
    return usable


def _is_list(kind: Any) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _numbers(values: Any) -> Any:
    kind = values.type
    narrow = pa.types.is_float16(kind) or pa.types.is_float32(kind)
    target = pa.float32() if narrow else pa.float64()
    cast = pc.cast(pc.cast(values, pa.uint8()), target) if pa.types.is_boolean(kind) else pc.cast(values, target)
    return pc.fill_null(cast, float("nan")).to_numpy(zero_copy_only=False)
