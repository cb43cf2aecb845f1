"""The two sources of rows for ``lum drift``, tables and NumPy arrays, and how a sample is read from either."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from luminosity.cli.common.table_options import TableReader
from luminosity.cli.drift.table_source import TableSource
from luminosity.drift.rows import as_floats
from luminosity.drift.samples import RowSampler, SampledRows
from luminosity.drift.transforms.column_transforms import rows_by_key
from luminosity.errors import DriftError, Fix, OptionError, TableError
from luminosity.evaluation.description.describe_table import DescriptionState
from luminosity.io.formats import recognise

__all__ = [
    "ArraySource",
    "Source",
    "has_only_arrays",
    "open_source",
    "read_columns",
    "read_keyed_columns",
    "read_keyed_sample",
    "read_sample",
]
_ROWS_AT_ONCE = 1 << 16
_FLOATS = ("float32", "float64")  # types that rows are compared in; others are converted
_SHOWN_FILES = 5  # files in a message


class ArraySource:
    """The rows of one or many NumPy files, mapped into memory."""

    columns: tuple[str, ...] = ()

    def __init__(self, pattern: str) -> None:
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise DriftError(f"no file matches {pattern}; the current folder is {os.getcwd()}")
        self._files = [(path, _mapped(path)) for path in paths]
        widths = {array.shape[1] for _, array in self._files}
        if len(widths) > 1:
            found = ", ".join(f"{path} has {array.shape[1]}" for path, array in self._files[:_SHOWN_FILES])
            raise DriftError(f"{pattern}: found files with rows of different widths ({found}), expected one width")

    def pieces(self) -> Iterator[tuple[Any, Any, str, int]]:
        """Yield rows, a mask of null rows (there are none), their file, and the number of the first row in it."""
        for path, array in self._files:
            for first in range(0, len(array), _ROWS_AT_ONCE):
                rows = as_floats(np.asarray(array[first : first + _ROWS_AT_ONCE]))
                yield rows, np.zeros(len(rows), bool), path, first

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as record batches, whose columns are named by their positions."""
        for rows, _, _, _ in self.pieces():
            columns = {str(at): np.ascontiguousarray(column) for at, column in enumerate(rows.T)}
            yield pa.RecordBatch.from_pydict(columns)

    def whole(self) -> Any | None:
        """Return the mapped array of a single file. If the file is overwritten meanwhile, the process is killed."""
        array = self._files[0][1]
        return np.asarray(array) if len(self._files) == 1 and array.dtype.name in _FLOATS else None

    def details(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return the file, the position and the numbers of each row."""
        starts = np.cumsum([0, *(len(array) for _, array in self._files)])
        at = np.searchsorted(starts, numbers, side="right") - 1
        names = [{"file": os.path.basename(path)} if len(self._files) > 1 else {} for path, _ in self._files]
        return [
            {**names[index], "row": int(number - starts[index]), **_own(self._files[index][1][number - starts[index]])}
            for index, number in zip(at, numbers, strict=True)
        ]


def has_only_arrays(folder: str) -> bool:
    """Return whether the path is a folder in which all files are NumPy arrays."""
    if not os.path.isdir(folder):
        return False
    names = [name for name in os.listdir(folder) if not name.startswith((".", "_"))]
    return bool(names) and all(name.lower().endswith(".npy") for name in names)


def _mapped(path: str) -> Any:
    if os.path.isdir(path):
        raise DriftError(f"{path} is a folder, expected a NumPy file", fix="use a quoted pattern for several files")
    try:
        # np.load() takes a file of another kind for a pickle. This function knows only arrays, and unpickles nothing.
        array: Any = np.lib.format.open_memmap(path, mode="r")
    except (OSError, EOFError, ValueError) as error:
        raise DriftError(f"{path}: can't be read as a NumPy array; {_likely_cause(error)}") from None
    if array.dtype.kind not in "fiub":
        raise DriftError(f"{path}: holds {array.dtype}, expected real numbers")
    if array.ndim not in (1, 2):
        raise DriftError(
            f"{path}: has {array.ndim} dimensions {array.shape}, expected 2: one row per example",
            fix="if these are the vectors of each token, take their mean" if array.ndim == 3 else None,
        )
    return array[:, None] if array.ndim == 1 else array


def _likely_cause(error: Exception) -> str:
    said = " ".join(str(error).split())
    if isinstance(error, PermissionError):
        return f"this user may not read it ({said})"
    if "Python objects" in said:
        return "it holds Python objects, which are not unpickled because that could run any code; expected numbers"
    if "mmap length" in said:
        return "it is cut off: its header announces more rows than there are"
    return f"it is damaged, cut off, or not a NumPy file ({said})"


def _own(row: Any) -> dict[str, Any]:
    """Return a row's numbers: an array knows nothing else about a row."""
    values = [float(value) for value in row]
    return {"value": values[0]} if len(values) == 1 else {"numbers": values}


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
