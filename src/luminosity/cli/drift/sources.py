"""The two sources of rows for ``lum drift``, tables and NumPy arrays, and how a sample is read from either."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from luminosity.cli.common.table_options import TableReader
from luminosity.cli.drift.array_source import ArraySource, has_only_arrays
from luminosity.cli.drift.table_source import TableSource
from luminosity.drift.columns import rows_by_key
from luminosity.drift.samples import RowSampler, SampledRows
from luminosity.errors import DriftError, Fix, OptionError, TableError
from luminosity.evaluation.description.describe_table import DescriptionState
from luminosity.io.formats import recognise

__all__ = ["Source", "open_source", "read_columns", "read_keyed_columns", "read_keyed_sample", "read_sample"]


class Source(Protocol):
    """Rows of numbers in files. ``columns`` is empty for arrays, which have no names for their columns."""

    columns: tuple[str, ...]

    def pieces(self) -> Iterator[tuple[Any, Any, str, int]]:
        """Yield rows, a mask of the rows that are null, their file, and the number of the first row in the file."""
        ...

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as record batches with the columns to compare, and that of keys."""
        ...

    def whole(self) -> Any | None:
        """Return all rows as one matrix if that takes no copy, otherwise None."""
        ...

    def details(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return what the files say about these rows, one dictionary per row."""
        ...


def open_source(
    pattern: str,
    columns: Sequence[str],
    reader: TableReader,
    by: str | None = None,
    csv: Mapping[str, Any] = MappingProxyType({}),
    *,
    reads: str = "rows",
) -> Source:
    """Return the source of rows for a file, a folder or a pattern.

    For tables, ``by`` is the column of keys, and ``csv`` are arguments of ``ReadTable``. ``reads`` is what the test
    reads: vectors of numbers, or columns of any type.
    """
    if by is not None and (pattern.lower().endswith(".npy") or has_only_arrays(pattern)):
        raise OptionError(f"--by={by} is for tables, but {pattern} is a NumPy array, which has no columns")
    if pattern.lower().endswith(".npy"):
        return ArraySource(pattern)
    if has_only_arrays(pattern):
        raise DriftError(
            f"{pattern} is a folder with NumPy files, expected a file, or a folder with files of a table",
            fix=f"use a quoted pattern: '{os.path.join(pattern, '*.npy')}'",
        )
    _check_format(pattern)
    return TableSource(pattern, columns, by, csv, reader, reads)


def _check_format(path: str) -> None:
    """Raise for a file that is neither a table nor an array, naming the suffixes of both."""
    if os.path.isfile(path):
        try:
            recognise(path)
        except TableError as error:
            raise DriftError(f"{error.message}; or in .npy for NumPy arrays") from None


def read_sample(
    source: Source, most: int | None, seed: int, skip_missing: bool, on_rows: Callable[[int], None]
) -> SampledRows:
    """Read all rows of a source, or draw ``most`` random ones. ``on_rows`` is called with the number of rows read."""
    sampler = RowSampler(most, seed=seed)
    for piece in source.pieces():
        sampler.add(piece[0], _usable(source, piece, skip_missing))
        on_rows(sampler.read)
    whole = source.whole() if sampler.read and most is None and not sampler.skipped else None
    if whole is not None:
        return SampledRows(whole, np.arange(sampler.read), sampler.read)
    return sampler.sample()


def read_keyed_sample(
    source: TableSource, most: int | None, seed: int, skip_missing: bool, on_rows: Callable[[int], None]
) -> dict[Any, SampledRows]:
    """Read the rows of each key, or draw ``most`` random ones of each. Row numbers count all rows of the source."""
    samplers: dict[Any, RowSampler] = {}
    numbers: dict[Any, list[Any]] = {}
    read = 0
    for piece, keys in source.keyed_pieces():
        usable = _usable(source, piece, skip_missing)
        places: dict[Any, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(key, []).append(place)
        for key, own in places.items():
            samplers.setdefault(key, RowSampler(most, seed=seed)).add(piece[0][own], usable[own])
            numbers.setdefault(key, []).append(np.array(own) + read)
        read += len(keys)
        on_rows(read)
    found: dict[Any, SampledRows] = {}
    for key, sampler in samplers.items():
        sample = sampler.sample()
        found[key] = replace(sample, numbers=np.concatenate(numbers[key])[sample.numbers])
    return found


def read_columns(source: Source, on_rows: Callable[[int], None]) -> DescriptionState:
    """Summarise the columns of a source, in bounded memory."""
    return read_keyed_columns(source, None, on_rows).get(None, DescriptionState())


def read_keyed_columns(source: Source, by: str | None, on_rows: Callable[[int], None]) -> dict[Any, DescriptionState]:
    """Summarise the columns of each key; without ``by``, all rows have the key None."""
    found: dict[Any, DescriptionState] = {}
    read = 0
    for batch in source.batches():
        for key, rows in [(None, batch)] if by is None else rows_by_key(batch, by, source.columns):
            found.setdefault(key, DescriptionState()).add(rows)
        read += batch.num_rows
        on_rows(read)
    return found


def _usable(source: Source, piece: tuple[Any, Any, str, int], skip_missing: bool) -> Any:
    """Return a mask of rows without missing numbers, or raise an error that names the first other row."""
    rows, null, file, first = piece
    usable = ~null & np.isfinite(rows).all(axis=1)
    if not skip_missing and not usable.all():
        at = int((~usable).argmax())
        raise DriftError(
            f"{file}: found {'null' if null[at] else 'NaN or infinity'} in row {first + at} (counted from 0) of "
            f"{', '.join(source.columns) or 'the array'}, expected numbers",
            fix=Fix("pass skip_missing=True", command="add --skip-missing to leave such rows out"),
        )
    return usable
