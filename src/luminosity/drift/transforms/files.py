"""Rows of a reference that is in files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.io.filesystems import FileSystems

from luminosity.drift.transforms.npy import npy_rows
from luminosity.errors import DriftError

__all__ = ["ReadFiles", "is_npy"]

_ROWS = 10_000
_OTHERWISE = "Folders, and columns that are in their names, are read by ReadTable: give what it reads as the reference."


def is_npy(pattern: str) -> bool:
    return pattern.lower().endswith(".npy")


class ReadFiles(beam.PTransform[Any, Any]):
    """Parquet into record batches with the columns that are needed, `.npy` into matrices of rows.

    Args:
        pattern: one path, or many with ``*``, wherever Beam reads files.
        columns: of Parquet.
    """

    def __init__(self, pattern: str, columns: Sequence[str]) -> None:
        super().__init__()
        self._pattern = pattern
        self._columns = columns

    def expand(self, input_or_inputs: Any) -> Any:
        kind = Any if is_npy(self._pattern) else pa.RecordBatch
        return (
            input_or_inputs
            | "Pattern" >> beam.Create([self._pattern])
            | "Match" >> beam.FlatMap(_matched)
            | "Share" >> beam.Reshuffle()
            | "Read" >> beam.FlatMap(_read, list(self._columns)).with_output_types(kind)
        )


def _matched(pattern: str) -> list[str]:
    found = [file.path for file in FileSystems.match([pattern])[0].metadata_list]
    if not found:
        raise DriftError(f"Found no file at {pattern!r}, expected the reference there.")
    return found


def _read(path: str, columns: Sequence[str]) -> Iterator[Any]:
    with _opened(path) as file:
        yield from npy_rows(path, file, _ROWS) if is_npy(path) else _parquet(path, file, columns)


def _opened(path: str) -> Any:
    try:
        return FileSystems.open(path)
    except IsADirectoryError:
        raise DriftError(
            f"Found a folder at {path!r}, expected files, such as '{path}/*.parquet'. {_OTHERWISE}"
        ) from None


def _parquet(path: str, file: Any, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    try:
        parquet = pq.ParquetFile(file)
    except pa.ArrowException as error:
        raise DriftError(f"Can't read {path} as Parquet: {error}") from error
    there = parquet.schema_arrow.names
    missing = [name for name in columns if name not in there]
    if missing:
        hint = f" {_OTHERWISE}" if f"/{missing[0]}=" in path else ""
        raise DriftError(f"Found no column {missing[0]!r} in {path}. It has {', '.join(there)}.{hint}")
    yield from parquet.iter_batches(batch_size=_ROWS, columns=list(columns))
