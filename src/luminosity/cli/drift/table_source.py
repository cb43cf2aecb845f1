"""Rows of numbers in the columns of a table, for ``lum drift``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from luminosity._shared.text import list_some
from luminosity.cli.common.table_options import TableReader
from luminosity.errors import DriftError, OptionError

__all__ = ["TableSource"]

_NUMBERS = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean, pa.types.is_decimal)
_SHOWN_COLUMNS = 20  # names of columns in a message


class TableSource:
    """Columns of Parquet, JSON lines, CSV or Arrow files, on any file system that Beam reads.

    Without ``columns``, a test that reads rows takes the table's only column of vectors, and one that reads columns all
    of them. ``by`` is a column of keys.
    """

    def __init__(
        self,
        pattern: str,
        columns: Sequence[str],
        by: str | None,
        csv: Mapping[str, Any],
        reader: TableReader,
        reads: str = "rows",
    ) -> None:
        self._pattern = pattern
        self._csv = csv
        self._reader = reader
        self._by = by
        self.columns = tuple(columns)
        if reads == "columns":
            keys = [by] if by is not None and by not in columns else []
            self._table = reader.open(pattern, [*columns, *keys] if columns else None, csv)
            if by is not None:
                _check_keys(_field(self._table.schema, by, pattern), pattern)
            return
        if not columns:
            columns = _only_vectors(self._read().schema, pattern)
        keys = [by] if by is not None and by not in columns else []
        self._table = reader.open(pattern, [*columns, *keys], csv)
        schema = self._table.schema
        if by is not None:
            _check_keys(schema.field(by), pattern)
        _check_numbers([schema.field(name) for name in columns], pattern, lambda: self._read().schema)
        self.columns = tuple(columns)

    def pieces(self) -> Iterator[tuple[Any, Any, str, int]]:
        """Yield rows, a mask of the rows that are null, their file, and the number of the first row in the file."""
        return (piece for piece, _ in self._pieces())

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as record batches with the columns to compare, and that of keys."""
        return (batch for _, batch in self._reader.rows(self._table))

    def keyed_pieces(self) -> Iterator[tuple[tuple[Any, Any, str, int], list[Any]]]:
        """Yield each of ``pieces()`` with the keys of its rows."""
        assert self._by is not None
        for piece, batch in self._pieces():
            yield piece, batch.column(self._by).to_pylist()

    def _pieces(self) -> Iterator[tuple[tuple[Any, Any, str, int], pa.RecordBatch]]:
        vectors, current, first = _Vectors(self.columns), "", 0
        for file, batch in self._reader.rows(self._table):
            if file != current:
                current, first = file, 0
            yield (*vectors.of(batch, file, first), file, first), batch
            first += batch.num_rows

    def whole(self) -> None:
        """Return None: a table is read in batches."""

    def details(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return the other columns of these rows. They are read only now, up to the last of the rows."""
        schema = self._read().schema
        others = [name for name in schema.names if name not in _vector_columns(schema)]
        found: dict[int, dict[str, Any]] = {}
        first, file_first, current = 0, 0, ""
        for file, batch in self._read(others or list(self.columns)).all(_ignore):
            if file != current:
                current, file_first = file, first
            for number in (number for number in numbers if first <= number < first + batch.num_rows):
                row = batch.slice(number - first, 1).to_pylist()[0] if others else {}
                found[number] = {**self._named(file), "row": number - file_first, **row}
            first += batch.num_rows
            if len(found) == len(set(numbers)):
                break
        return [found[number] for number in numbers]

    def _read(self, columns: Sequence[str] | None = None) -> Any:
        from luminosity.io.read_table import ReadTable

        return ReadTable(self._pattern, columns, **self._csv)

    def _named(self, file: str) -> dict[str, str]:
        """Return the name of a row's file, unless there is only one file."""
        return {} if self._pattern.endswith(os.path.basename(file)) else {"file": os.path.basename(file)}


def _ignore(_: Any) -> None:
    """Leave a line out that can't be read: it was set aside, or refused, when the sample was read."""


class _Vectors:
    """Turns the columns of batch after batch into rows of numbers. All rows have the width of the first."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._widths: dict[str, tuple[int, str]] = {}

    def of(self, batch: pa.RecordBatch, file: str, first_row: int) -> tuple[Any, Any]:
        """Return the rows, with NaN for missing numbers, and a mask of rows whose whole value is null."""
        parts = [self._part(name, batch.column(name), file, first_row) for name in self._columns]
        rows = parts[0][0] if len(parts) == 1 else np.concatenate([rows for rows, _ in parts], axis=1)
        return rows, np.logical_or.reduce([null for _, null in parts])

    def _part(self, name: str, values: Any, file: str, first_row: int) -> tuple[Any, Any]:
        values = values.storage if isinstance(values, pa.ExtensionArray) else values
        null = np.asarray(values.is_null())
        if not _is_list(values.type):
            return _numbers(values)[:, None], null
        lengths = np.asarray(pc.fill_null(pc.call_function("list_value_length", [values]), 0))
        if null.all():  # Their width is not known yet; the rows are left out, or refused.
            return np.full((len(values), self._widths.get(name, (1, ""))[0]), np.nan, np.float32), null
        width, origin = self._widths.setdefault(name, (int(lengths[~null][0]), f"{file}, row {first_row}"))
        other = ~null & (lengths != width)
        if other.any():
            at = int(other.argmax())
            raise DriftError(
                f"{file}: row {first_row + at} (counted from 0) of column {name!r} has {lengths[at]} numbers, "
                f"expected {width} as before it ({origin}); perhaps these vectors come from another model"
            )
        flat = _numbers(values.flatten())
        rows = np.full((len(values), width), np.nan, flat.dtype)
        rows[~null] = flat.reshape(-1, width) if width else 0
        return rows, null


def _only_vectors(schema: Any, pattern: str) -> list[str]:
    found = _vector_columns(schema)
    if len(found) != 1:
        which = f"{len(found)} columns of vectors ({', '.join(found)})" if found else "no column of vectors"
        raise OptionError(
            f"{pattern} has {which}, expected one; its columns are {list_some(schema.names, _SHOWN_COLUMNS)}",
            fix="use --column to name the column of vectors, or several columns of numbers",
        )
    return found


def _vector_columns(schema: pa.Schema) -> list[str]:
    """Return the names of the columns that hold lists of floating-point numbers."""
    return [field.name for field in schema if _is_list(field.type) and pa.types.is_floating(field.type.value_type)]


def _field(schema: pa.Schema, name: str, pattern: str) -> Any:
    if name not in schema.names:
        raise OptionError(
            f"{pattern} has no column {name!r}; its columns are {list_some(schema.names, _SHOWN_COLUMNS)}",
            fix="use --by with one of them",
        )
    return schema.field(name)


def _check_keys(field: Any, pattern: str) -> None:
    if pa.types.is_nested(field.type):
        raise DriftError(
            f"{pattern}: column {field.name!r} holds {field.type}, expected texts, numbers or dates as keys",
            fix="use --by with another column",
        )


def _check_numbers(chosen: Sequence[Any], pattern: str, whole: Callable[[], pa.Schema]) -> None:
    """Raise an error if a chosen column has no numbers. ``whole`` is called only to name columns that have."""
    for field in chosen:
        if not _has_numbers(field.type):
            others = [each.name for each in whole() if _has_numbers(each.type)]
            instead = f"use one of {list_some(others, _SHOWN_COLUMNS)}" if others else "no column has numbers"
            raise DriftError(
                f"{pattern}: column {field.name!r} holds {field.type}, expected vectors or numbers", fix=instead
            )


def _has_numbers(kind: Any) -> bool:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    kind = kind.value_type if _is_list(kind) else kind
    return any(is_number(kind) for is_number in _NUMBERS)


def _is_list(kind: Any) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _numbers(values: Any) -> Any:
    kind = values.type
    narrow = pa.types.is_float16(kind) or pa.types.is_float32(kind)
    target = pa.float32() if narrow else pa.float64()
    cast = pc.cast(pc.cast(values, pa.uint8()), target) if pa.types.is_boolean(kind) else pc.cast(values, target)
    return pc.fill_null(cast, float("nan")).to_numpy(zero_copy_only=False)
