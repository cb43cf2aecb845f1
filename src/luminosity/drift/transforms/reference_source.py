"""Turns what users pass as the reference, a PCollection, an array or a path, into rows by key."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.io.filesystems import FileSystems

from luminosity.drift.rows import as_rows, is_number
from luminosity.drift.transforms.elements import Gather, Reader
from luminosity.errors import DriftError

__all__ = ["ReadFiles", "Reference", "ReferenceRows", "check_reference", "has_keys", "npy_rows"]

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


Reference: TypeAlias = Any  # a PCollection, an array, or a path of files
_ARRAY_BYTES = 4 << 20  # bytes of an array in one element of the pipeline's description
_MOST_ARRAY_BYTES = 256 << 20  # bytes of an array that is sent with the pipeline's description


def has_keys(reference: Reference) -> bool:
    """Return whether the rows of the reference have keys. An array or ``.npy`` file is the reference of every key."""
    return isinstance(reference, beam.PCollection) or (_is_path(reference) and not is_npy(os.fspath(reference)))


def check_reference(reference: Reference, reader: Reader) -> None:
    """Raise an error for references that are known to be wrong before the pipeline is built."""
    if isinstance(reference, beam.PCollection):
        return
    if not _is_path(reference):
        _checked(reference)
    elif not is_npy(os.fspath(reference)) and reader.column is None:
        raise DriftError(
            f"found reference={os.fspath(reference)!r} without column=", fix="pass column=, the column of vectors"
        )
    elif reader.keyed and has_keys(reference):
        raise DriftError(
            f"found keyed=True and reference={os.fspath(reference)!r}, whose rows have no keys",
            fix="pass by=, the column of keys, or pass the reference as a PCollection of pairs",
        )


class ReferenceRows(beam.PTransform[Any, Any]):
    """Turns the reference into pairs of a key and rows. Applied to the PCollection, or otherwise to the pipeline.

    ``reader`` is the reader of the current sample, with the reference's seed.
    """

    def __init__(self, reference: Reference, reader: Reader) -> None:
        super().__init__()
        self._reference = reference
        self._reader = reader if has_keys(reference) else Reader(seed=reader.seed)
        self._columns = reader.columns

    def expand(self, input_or_inputs: Any) -> Any:
        """Read the reference, unless it is a PCollection, and gather its rows by key."""
        rows = input_or_inputs if isinstance(input_or_inputs, beam.PCollection) else input_or_inputs | self._source()
        return rows | "Gather" >> Gather(self._reader)

    def _source(self) -> Any:
        if _is_path(self._reference):
            return "Read" >> ReadFiles(os.fspath(self._reference), self._columns)
        pieces = list(_pieces(_checked(self._reference)))
        return "Create" >> beam.Create(pieces, reshuffle=len(pieces) > 1)


def _is_path(reference: Any) -> bool:
    return isinstance(reference, str | os.PathLike)


def _checked(reference: Any) -> Any:
    rows = as_rows(reference, "the reference")
    if rows.nbytes > _MOST_ARRAY_BYTES:
        raise DriftError(
            f"the reference is an array of {rows.nbytes >> 20:,} MB, expected at most {_MOST_ARRAY_BYTES >> 20} MB, "
            "because it is sent with the pipeline's description",
            fix="write it to a file, and pass its path",
        )
    return rows


def _pieces(rows: Any) -> Iterator[Any]:
    count = max(1, _ARRAY_BYTES // (rows.shape[1] * rows.itemsize))
    return (rows[start : start + count] for start in range(0, len(rows), count))
