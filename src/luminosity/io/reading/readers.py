"""Read files with the reader of their format: in a step that runners can split, or without a pipeline."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa
from apache_beam import pvalue
from apache_beam.metrics import Metrics

from luminosity.io.formats import Format
from luminosity.io.reading.csv_dialect import CsvStyle
from luminosity.io.reading.csv_reader import CsvReader
from luminosity.io.reading.csv_types import count_first_rows, csv_schema
from luminosity.io.reading.file_rows import FILE_COLUMNS, FilesReader
from luminosity.io.reading.find_files import TableFile, open_text, readable
from luminosity.io.reading.json_reader import JsonLinesReader, json_lines_schema
from luminosity.io.reading.named_table import NamedTable, Part
from luminosity.io.reading.parquet_reader import ArrowReader, ParquetReader, arrow_schema, parquet_rows, parquet_schema
from luminosity.io.reading.reader import (
    EVERYTHING,
    MAX_BYTES,
    PIECE_BYTES,
    ByteRange,
    ByteRangeTracker,
    Reader,
    bounded,
)
from luminosity.io.reading.selection import Selection
from luminosity.io.reading.tar_samples import SamplesReader, samples_schema
from luminosity.io.reading.text_lines import Doubts, Report, Unreadable, head, letters, raise_unreadable

__all__ = [
    "UNREADABLE",
    "ReadRanges",
    "RowCount",
    "Settings",
    "all_rows",
    "count_rows",
    "first_rows",
    "open_reader",
    "schema_of",
]

UNREADABLE = "unreadable"  # the tag of dead letters
_RANGE = beam.DoFn.RestrictionParam()  # The DoFn itself is the provider.
_ROWS = Metrics.counter("ReadTable", "rows_read")
_BYTES = Metrics.counter("ReadTable", "bytes_read")
_UNREADABLE = Metrics.counter("ReadTable", "lines_unreadable")
_FILES = Metrics.counter("ReadTable", "files_read")
_MOST_COUNTED = 20  # files of a format: more would take long to open, and the others are probably alike


@dataclass(frozen=True)
class Settings:
    """How to read the files of a table. It is sent to the workers."""

    selection: Selection
    csv: CsvStyle
    rows_per_batch: int
    keeps_unreadable: bool = False  # lines that can't be read are dead letters, and do not end the run
    max_bytes: int = MAX_BYTES  # of a file that is a value of a row
    table: NamedTable | None = None  # that opens its parts itself


def open_reader(file: TableFile, settings: Settings, report: Report) -> Reader:
    """Open a file with the reader of its format; the caller closes it. Lines that can't be read go to ``report``."""
    if settings.table is not None and isinstance(file, Part):
        return settings.table.reader(file, settings.selection, settings.rows_per_batch)
    if file.format is Format.PARQUET:
        return ParquetReader(file, settings.selection, settings.rows_per_batch)
    if file.format is Format.ARROW:
        return ArrowReader(file, settings.selection)
    if file.format.is_csv:
        return CsvReader(file, settings.selection, settings.csv, report)
    if file.format is Format.FILES:
        return FilesReader(file, settings.selection, settings.rows_per_batch, settings.max_bytes, report)
    if file.format is Format.WEBDATASET:
        return SamplesReader(file, settings.selection, settings.rows_per_batch, settings.max_bytes, report)
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
        if file.format is Format.FILES:
            return FILE_COLUMNS
        if file.format is Format.WEBDATASET:
            return samples_schema(file, report)
        return csv_schema(file, csv, report, doubts) if file.format.is_csv else json_lines_schema(file, report, doubts)


class RowCount(NamedTuple):
    """The number of rows of a table, which may be an estimate."""

    rows: int
    is_exact: bool


def count_rows(files: Sequence[TableFile], csv: CsvStyle) -> RowCount | None:
    """Return the number of rows without reading the table, or None if it can't be told.

    Footers of Parquet have it. For text, the first rows of some files tell how many bytes a row has.
    """
    if parts := [file for file in files if isinstance(file, Part)]:
        counts = [part.rows for part in parts]
        return None if None in counts else RowCount(sum(count or 0 for count in counts), is_exact=True)
    total, is_exact = float(sum(len(file.members) for file in files)), True
    for kind in {file.format for file in files if not file.members}:
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
        if file.format in (Format.ARROW, Format.WEBDATASET) or file.compression is not None:
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


class ReadRanges(beam.DoFn, beam.RestrictionProvider):
    """Reads ranges of a file's bytes; a row belongs to the range in which it begins.

    Lines that can't be read are dead letters if the settings say so; otherwise they end the run. The last file stays
    open, since the next range is often in the same file.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: tuple[TableFile, Reader] | None = None
        self._unreadable: list[Unreadable] = []

    def process(self, element: TableFile, tracker: Any = _RANGE) -> Iterator[Any]:
        """Read the rows that begin in the range, and count rows, bytes and files."""
        byte_range = tracker.current_restriction()
        reached = byte_range.start
        self._unreadable.clear()

        def claim(position: int) -> int:
            nonlocal reached
            granted = int(tracker.try_claim(position))
            if not element.members:  # The reader counts files that are rows.
                if reached == 0 < granted:
                    _FILES.inc()
                _BYTES.inc(granted - reached)
            reached = granted
            return granted

        is_read = False
        try:
            with readable(element):
                for batch in self._reader(element).batches(byte_range, claim):
                    finished = self._settings.selection.finish(batch, element.partition)
                    for part in bounded(finished, self._settings.rows_per_batch):
                        _ROWS.inc(part.num_rows)
                        yield part
                    yield from self._letters()
                yield from self._letters()
                claim(EVERYTHING)
            is_read = True
        finally:
            if not is_read:
                self.teardown()  # The reader may be anywhere in the file, so it can't be used again.

    def _letters(self) -> Iterator[Any]:
        """Yield the lines that could not be read since the last call."""
        if self._unreadable:
            _UNREADABLE.inc(len(self._unreadable))
            yield pvalue.TaggedOutput(UNREADABLE, letters(self._unreadable))
            self._unreadable.clear()

    def teardown(self) -> None:
        """Close the file that is still open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def initial_restriction(self, element: TableFile) -> ByteRange:
        """Return the range of the whole file; an empty file counts as one byte."""
        return ByteRange(0, max(1, element.size))

    def create_tracker(self, restriction: ByteRange) -> ByteRangeTracker:
        """Return a tracker that grants claims up to a byte."""
        return ByteRangeTracker(restriction)

    def split(self, element: TableFile, restriction: ByteRange) -> Generator[ByteRange, Any, None]:
        """Cut a large range where the file's format allows it."""
        if restriction.size <= PIECE_BYTES:
            yield restriction
            return
        with readable(element):
            cuts = self._reader(element).cuts()
        yield from restriction.pieces(PIECE_BYTES, cuts)

    def restriction_size(self, element: TableFile, restriction: ByteRange) -> int:
        """Return the bytes of the range."""
        return restriction.size

    def _reader(self, file: TableFile) -> Reader:
        if self._open is None or self._open[0] != file:
            self.teardown()
            report = self._unreadable.append if self._settings.keeps_unreadable else raise_unreadable
            self._open = file, open_reader(file, self._settings, report)
        return self._open[1]
