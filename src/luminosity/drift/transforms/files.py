"""Reads the rows of a reference from Parquet and ``.npy`` files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.io.filesystems import FileSystems

from luminosity.drift.rows import is_number
from luminosity.errors import DriftError

__all__ = ["ReadFiles", "is_npy", "npy_rows"]

_ROWS = 10_000  # rows of an element
_USE_READ_TABLE = "pass what ReadTable reads as the reference: it knows folders, and columns in their names"

_HEADERS: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,  # Version 3 is only for arrays of records.
}


def is_npy(pattern: str) -> bool:
    """Return whether the pattern names ``.npy`` files."""
    return pattern.lower().endswith(".npy")


class ReadFiles(beam.PTransform[Any, Any]):
    """Reads Parquet files into record batches, and ``.npy`` files into matrices of rows.

    Args:
        pattern: a path, or many with ``*``, on any file system that Beam reads.
        columns: the columns to read from Parquet files; None reads all.
    """

    def __init__(self, pattern: str, columns: Sequence[str] | None) -> None:
        super().__init__()
        self._pattern = pattern
        self._columns = columns

    def expand(self, input_or_inputs: Any) -> Any:
        """Find the files when the pipeline runs, distribute them over workers and read them."""
        columns = None if self._columns is None else list(self._columns)
        kind = Any if is_npy(self._pattern) else pa.RecordBatch
        return (
            input_or_inputs
            | "Pattern" >> beam.Create([self._pattern])
            | "Match" >> beam.FlatMap(_matched)
            | "Share" >> beam.Reshuffle()
            | "Read" >> beam.FlatMap(_read, columns).with_output_types(kind)
        )


def _matched(pattern: str) -> list[str]:
    found = [file.path for file in FileSystems.match([pattern])[0].metadata_list]
    if not found:
        raise DriftError(f"found no file at {pattern!r}, expected the reference there")
    return found


def _read(path: str, columns: Sequence[str] | None) -> Iterator[Any]:
    with _opened(path) as file:
        yield from npy_rows(path, file, _ROWS) if is_npy(path) else _parquet(path, file, columns)


def _opened(path: str) -> Any:
    try:
        return FileSystems.open(path)
    except IsADirectoryError:
        raise DriftError(
            f"found a folder at {path!r}, expected files, such as '{path}/*.parquet'", fix=_USE_READ_TABLE
        ) from None


def _parquet(path: str, file: Any, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    try:
        parquet = pq.ParquetFile(file)
    except pa.ArrowException as error:
        raise DriftError(f"can't read {path} as Parquet: {error}") from error
    there = parquet.schema_arrow.names
    missing = [name for name in columns or () if name not in there]
    if missing:
        raise DriftError(
            f"found no column {missing[0]!r} in {path}, expected one of {', '.join(there)}",
            fix=_USE_READ_TABLE if f"/{missing[0]}=" in path else None,
        )
    yield from parquet.iter_batches(batch_size=_ROWS, columns=columns)


def npy_rows(path: str, file: Any, at_once: int) -> Iterator[Any]:
    """Yield the rows of an open ``.npy`` file, ``at_once`` at a time.

    ``np.load`` would hold all rows, and the file's bytes as well. Nothing is unpickled: arrays of objects are errors.
    """
    shape, in_columns, dtype = _header(path, file)
    if not is_number(dtype):
        what = "Python objects, which are not unpickled" if dtype.hasobject else str(dtype)
        raise DriftError(f"the array in {path} holds {what}, expected numbers")
    if len(shape) not in (1, 2):
        raise DriftError(f"the array in {path} has {len(shape)} dimensions, expected 2: one row per example")
    count, width = shape[0], math.prod(shape[1:])
    step = max(1, count) if in_columns else at_once  # A row needs all columns.
    for start in range(0, count, step):
        here = min(step, count - start)
        data = file.read(here * width * dtype.itemsize)
        if len(data) < here * width * dtype.itemsize:
            raise DriftError(f"can't read {path} as an array: it is cut off, its header announces {count:,} rows")
        flat = np.frombuffer(data, dtype) if data else np.empty(0, dtype)
        rows = flat.reshape((here, width), order="F" if in_columns else "C")
        yield from (rows[first : first + at_once] for first in range(0, here, at_once))


def _header(path: str, file: Any) -> tuple[tuple[int, ...], bool, Any]:
    try:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"it is of version {version[0]}.{version[1]}")
        return _HEADERS[version](file)
    except ValueError as error:
        raise DriftError(f"can't read {path} as an array: {' '.join(str(error).split())}") from error
