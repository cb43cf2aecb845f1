"""Open a file with the reader of its format, and read rows without a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa

from luminosity.io.formats import Format
from luminosity.io.reading.arrow_reader import ArrowReader, arrow_schema
from luminosity.io.reading.byte_ranges import EVERYTHING, ByteRange
from luminosity.io.reading.csv_dialect import CsvStyle
from luminosity.io.reading.csv_reader import CsvReader, csv_schema
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.json_reader import JsonLinesReader, json_lines_schema
from luminosity.io.reading.open_file import readable
from luminosity.io.reading.parquet_reader import ParquetReader, parquet_schema
from luminosity.io.reading.reader import Reader
from luminosity.io.reading.selection import Selection
from luminosity.io.reading.text_lines import Report, Unreadable, raise_unreadable

__all__ = ["Settings", "all_rows", "first_rows", "open_reader", "schema_of"]


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


def schema_of(file: TableFile, csv: CsvStyle, report: Report) -> pa.Schema | None:
    """Return the columns of a file, or None if it is text without any line.

    Lines that can't be read, among those that types are guessed from, go to ``report``.
    """
    with readable(file):
        if file.format is Format.PARQUET:
            return parquet_schema(file)
        if file.format is Format.ARROW:
            return arrow_schema(file)
        return csv_schema(file, csv, report) if file.format.is_csv else json_lines_schema(file, report)


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
