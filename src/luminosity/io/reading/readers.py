"""Open a file with the reader of its format, and read rows without a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from luminosity.io.formats import Format
from luminosity.io.reading.byte_ranges import EVERYTHING, ByteRange
from luminosity.io.reading.csv_dialect import CsvStyle
from luminosity.io.reading.csv_reader import CsvReader
from luminosity.io.reading.csv_types import count_first_rows, csv_schema
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.json_reader import JsonLinesReader, json_lines_schema
from luminosity.io.reading.open_file import open_text, readable
from luminosity.io.reading.parquet_reader import ArrowReader, ParquetReader, arrow_schema, parquet_rows, parquet_schema
from luminosity.io.reading.reader import Reader
from luminosity.io.reading.selection import Selection
from luminosity.io.reading.text_lines import Doubts, Report, Unreadable, head, raise_unreadable

__all__ = ["RowCount", "Settings", "all_rows", "count_rows", "first_rows", "open_reader", "schema_of"]

_MOST_COUNTED = 20  # files of a format: more would take long to open, and the others are probably alike


@dataclass(frozen=True)
class Settings:
    """How to read the files of a table. It is sent to the workers."""

    selection: Selection
    csv: CsvStyle
    rows_per_batch: int
    keeps_unreadable: bool = False  # lines that can't be read are dead letters, and do not end the run


def open_reader(file: TableFile, settings: Settings, report: Report) -> Reader:
    """Open a file with the reader of its format; the caller closes it. Lines that can't be read go to ``report``."""
    if file.format is Format.PARQUET:
        return ParquetReader(file, settings.selection, settings.rows_per_batch)
    if file.format is Format.ARROW:
        return ArrowReader(file, settings.selection)
    if file.format.is_csv:
        return CsvReader(file, settings.selection, settings.csv, report)
    return JsonLinesReader(file, settings.selection, report)


def schema_of(file: TableFile, csv: CsvStyle, report: Report, doubts: Doubts) -> pa.Schema | None:
    """Return the columns of a file, or None if it is text without any line.

    Lines that can't be read, among those that types are guessed from, go to ``report``; doubtful guesses to ``doubts``.
    """
    with readable(file):
        if file.format is Format.PARQUET:
            return parquet_schema(file)
        if file.format is Format.ARROW:
            return arrow_schema(file)
        return csv_schema(file, csv, report, doubts) if file.format.is_csv else json_lines_schema(file, report, doubts)


class RowCount(NamedTuple):
    """The number of rows of a table, which may be an estimate."""

    rows: int
    is_exact: bool


def count_rows(files: Sequence[TableFile], csv: CsvStyle) -> RowCount | None:
    """Return the number of rows without reading the table, or None if it can't be told.

    Footers of Parquet have it. For text, the first rows of some files tell how many bytes a row has.
    """
    total, is_exact = 0.0, True
    for kind in {file.format for file in files}:
        same = [file for file in files if file.format is kind]
        rows = size = 0
        for file in same[:_MOST_COUNTED]:
            found = _rows_and_bytes(file, csv)
            if found is None:
                return None
            rows, size = rows + found[0], size + found[1]
        whole = sum(file.size for file in same)
        is_exact = is_exact and size == whole
        total += rows * whole / size if size else 0
    return RowCount(round(total), is_exact)


def _rows_and_bytes(file: TableFile, csv: CsvStyle) -> tuple[int, int] | None:
    with readable(file):
        if file.format is Format.PARQUET:
            return parquet_rows(file), file.size
        if file.format.is_csv:
            return count_first_rows(file, csv)
        if file.format is Format.ARROW or file.compression is not None:
            return None
        with open_text(file) as stream:
            lines = head(stream)
        return lines.count(b"\n") + (not lines.endswith(b"\n") and bool(lines)), len(lines)


def first_rows(
    files: Sequence[TableFile], settings: Settings, count: int
) -> tuple[list[pa.RecordBatch], list[Unreadable]]:
    """Return the first ``count`` rows, and the lines that could not be read on the way to them.

    No more is read than the batches, chunks or row groups that contain these rows.
    """
    found: list[pa.RecordBatch] = []
    unreadable: list[Unreadable] = []
    for _, batch in all_rows(files, settings, unreadable.append if settings.keeps_unreadable else raise_unreadable):
        found.append(batch.slice(0, count))
        count -= found[-1].num_rows
        if not count:
            break
    return [batch for batch in found if batch.num_rows], unreadable


def all_rows(files: Sequence[TableFile], settings: Settings, report: Report) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield all batches, each with the path of its file. Lines that can't be read go to ``report``."""
    for file in files:
        with readable(file), closing(open_reader(file, settings, report)) as reader:
            for batch in reader.batches(ByteRange(0, EVERYTHING), lambda position: position):
                yield file.path, settings.selection.finish(batch, file.partition)
