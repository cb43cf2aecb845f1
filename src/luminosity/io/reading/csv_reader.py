"""CSV: a header, and rows of values as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from apache_beam.io.filesystems import FileSystems

from luminosity.errors import Fix
from luminosity.io.reading.csv_dialect import CsvDialect, CsvStyle, encoding_fix, likely_encoding, recognise_dialect
from luminosity.io.reading.csv_rows import CsvRows, find_rows
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.reader import EVERYTHING, TEXT_BYTES, ByteRange, Claim, Reader, claim_whole
from luminosity.io.reading.selection import Selection
from luminosity.io.reading.text_lines import LineNumbers, Report, Unreadable, line_chunks, readable_parts

__all__ = ["CsvParser", "CsvReader", "is_text", "skip"]

_READ_AHEAD = 64 << 10  # bytes behind the range, which most likely contain the end of its last row
_WRONG_COUNT = re.compile(r"CSV parse error: Expected (\d+) columns?, got (\d+)")
_WRONG_VALUE = re.compile(
    r"In CSV column #(\d+): (?:Row #\d+: )?CSV conversion error to (.*): invalid value '(.*)'", re.S
)
_NOT_UTF8 = "invalid UTF8 data"
_FIX = Fix(
    "pass schema= for other types or null_values= for other nulls, or collect lines that can't be read with "
    "with_exception_handling()",
    command="correct the line, add --null-values if the value means null, or add --dead-letters FILE to set such lines "
    "aside",
)
_FIX_QUOTES = Fix(
    "correct the line, or collect lines that can't be read with with_exception_handling()",
    command="correct the line, or add --dead-letters FILE to set such lines aside",
)


class CsvReader(Reader):
    """Reads CSV in chunks of whole rows.

    Where rows begin is known only from the beginning of the file, as a quoted value may contain line breaks. So a large
    file is first scanned for places to cut it, which takes a fraction of the time to parse it. A range knows a position
    at which a row begins. Remote files are not scanned, since that would fetch them twice: they are one range.
    """

    def __init__(self, file: TableFile, selection: Selection, style: CsvStyle, report: Report) -> None:
        self._file = file
        self._selection = selection
        self._style = style
        self._dialect = recognise_dialect(file, style, selection.stored.names)
        if self._dialect.header:
            expected = {field.name: field.type for field in selection.stored}
            found = [(name, expected.get(name, pa.string())) for name in self._dialect.header]
            selection.check(file.path, pa.schema(found))
        self._parser = CsvParser(file, self._dialect, style, selection.loaded, selection.origin, report)
        is_local = FileSystems.get_scheme(file.path) is None
        self._can_be_cut = file.compression is None and self._dialect.can_be_cut
        self._is_scanned = style.newlines_in_values and self._can_be_cut and is_local
        self._reached = 0  # where a row is known to begin, in the range that was read last

    def cuts(self) -> list[int] | None:
        """Return rows at which the file can be cut; None means anywhere, if values contain no line breaks."""
        if self._can_be_cut and not self._style.newlines_in_values:
            return None
        if not self._is_scanned:
            return []
        return [position for position, _ in self._row_chunks(0, 0, EVERYTHING, lambda position: position)]

    def batches(self, byte_range: ByteRange, claim: Claim) -> Iterator[pa.RecordBatch]:
        """Parse the rows that begin in this range. A batch is empty if none of its rows can be read."""
        if not self._dialect.header:
            return
        for position, rows in self._chunks(byte_range, claim):
            for table in self._parser.tables(position, rows):
                yield from table.combine_chunks().to_batches()

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def _chunks(self, byte_range: ByteRange, claim: Claim) -> Iterator[tuple[int, CsvRows]]:
        """Yield the rows that begin in the range, in chunks with their positions."""
        if self._is_scanned:
            origin = max(byte_range.origin, self._reached if self._reached <= byte_range.start else 0)
            yield from self._row_chunks(origin, byte_range.start, byte_range.stop, claim)
        elif self._can_be_cut and not self._style.newlines_in_values:
            for position, data in line_chunks(self._file, self._dialect.first, byte_range, claim):
                rows = find_rows(data, self._dialect.delimiter, is_last=True)
                if rows.has_line_breaks():
                    self._parser.refuse_line_breaks(position, rows)
                yield position, rows
        elif claim_whole(byte_range.start, claim):
            yield from self._row_chunks(0, 0, EVERYTHING, lambda position: position)

    def _row_chunks(self, origin: int, start: int, stop: int, claim: Claim) -> Iterator[tuple[int, CsvRows]]:
        """Yield the rows that begin at ``start`` or behind it; a row begins at ``origin``, or it is 0."""
        position, begun = max(origin, self._dialect.first), b""
        with self._dialect.open(self._file) as stream:
            skip(stream, position)
            while True:
                # A row that is still open is read in ever larger pieces, because each piece is scanned from its start.
                most = max(stop - position - len(begun), 0) + max(_READ_AHEAD, len(begun))
                read = stream.read(min(max(TEXT_BYTES, len(begun)), most))
                data = begun + read
                if not data:
                    return
                rows = find_rows(data, self._dialect.delimiter, is_last=not read)
                if position < start or not rows.end:
                    skipped = rows.cut_at(start - position) if position < start else 0
                    position, begun = position + skipped, data[skipped:]
                    continue
                granted = claim(position + rows.end) - position
                if granted <= 0:
                    return
                if granted < rows.end:
                    rows.end = rows.cut_at(granted)
                yield position, rows
                if granted < rows.end or not read:
                    return
                position, begun = position + rows.end, data[rows.end :]
                self._reached = position


class CsvParser:
    """Parses rows, and reports those that can't be read. ``origin`` is where ``schema`` comes from."""

    def __init__(
        self, file: TableFile, dialect: CsvDialect, style: CsvStyle, schema: pa.Schema, origin: str, report: Report
    ) -> None:
        from pyarrow import csv

        self._csv = csv
        self._file = file
        self._dialect = dialect
        self._parsing = dialect.parse_options()
        self._names = schema.names
        self._converting = style.convert_options(schema)
        texts, others = ([field for field in schema if is_text(field.type) is wanted] for wanted in (True, False))
        self._of_texts = style.convert_options(pa.schema(texts)) if texts else None
        self._of_others = style.typed_options(pa.schema(others)) if others else None
        self._has_marks = False
        self._origin = origin
        self._report = report
        self._numbers = LineNumbers(lambda: dialect.open(file))

    def tables(self, position: int, rows: CsvRows) -> Iterator[pa.Table]:
        """Yield the rows that can be read; ``position`` is that of the first."""

        def bad(at: int, line: bytes, error: Exception) -> None:
            self._report_bad(position + at, line, error)

        at = 0
        for start, stop in [fault for fault in rows.faults if fault[0] < rows.end]:
            yield from readable_parts(rows.data, rows.cut_at, self._parse, bad, at, start)
            what = "a quoted value begins in this line and does not end, or has more text behind its closing quote"
            self._report(self._unreadable(position + start, rows.data[start:stop], what, _FIX_QUOTES))
            at = stop
        yield from readable_parts(rows.data, rows.cut_at, self._parse, bad, at, rows.end)

    def refuse_line_breaks(self, position: int, rows: CsvRows) -> None:
        """Raise an error for rows that have line breaks in values, where the user said that there are none."""
        at = next((start for start, _ in rows.faults), 0)
        while rows.data.count(b"\n", at, (end := rows.cut_at(at + 1)) - 1) == 0 and not rows.faults and end < rows.end:
            at = end
        fix = Fix("leave newlines_in_values=False out")
        line = rows.data[at : rows.data.find(b"\n", at) + 1 or rows.end]
        raise self._unreadable(position + at, line, "a value begins in one line and ends in another", fix).error()

    def _parse(self, data: bytes) -> pa.Table:
        """Parse rows in one pass, or in two if columns of numbers have marks of nulls, which are texts elsewhere."""
        data = self._dialect.to_utf8(data)
        if not self._has_marks:
            try:
                return self._read(data, self._converting)
            except pa.ArrowInvalid as error:
                if self._of_others is None or not _WRONG_VALUE.search(str(error)):
                    raise
        parts = [self._read(data, options) for options in (self._of_texts, self._of_others) if options is not None]
        self._has_marks = True  # Other rows most likely have them as well.
        columns = {name: part.column(name) for part in parts for name in part.column_names}
        return pa.table([columns[name] for name in self._names], names=self._names)

    def _read(self, data: bytes, converting: Any) -> pa.Table:
        # One block for all rows: pyarrow refuses a row that is longer than a block.
        reading = self._csv.ReadOptions(column_names=self._dialect.header, block_size=max(1, len(data)))
        return self._csv.read_csv(pa.BufferReader(data), reading, self._parsing, converting)

    def _report_bad(self, position: int, line: bytes, error: Exception) -> None:
        message, fix = str(error), _FIX
        if found := _WRONG_COUNT.search(message):
            values = "1 value" if found[2] == "1" else f"{found[2]} values"
            reason = f"found {values}, expected {found[1]} as in the header"
            fix = _count_fix(self._dialect.delimiter)
        elif found := _WRONG_VALUE.search(message):
            name = self._dialect.header[int(found[1])]
            reason = (
                f"found {found[3]!r} in column {name!r}, expected {found[2]}; the types are those of {self._origin}"
            )
        elif _NOT_UTF8 in message:
            likely = likely_encoding(line)
            perhaps = f", perhaps they are {likely}" if likely else ""
            reason, fix = f"found bytes that are not {self._dialect.encoding}{perhaps}", encoding_fix(line)
        else:
            reason = " ".join(message.split())
        self._report(self._unreadable(position, line, reason, fix))

    def _unreadable(self, position: int, line: bytes, reason: str, fix: Fix) -> Unreadable:
        encoding = self._dialect.encoding if self._dialect.can_be_cut else "utf-8"
        text = line.decode(encoding, "backslashreplace").strip("\r\n")
        return Unreadable(self._file.path, self._numbers.at(position), position, text, reason, fix)


def _count_fix(delimiter: str) -> Fix:
    """Return the advice for a line with too many or too few values."""
    quotes = f"correct the line (a value that contains {delimiter!r} needs quotes)"
    return Fix(
        f"{quotes}, pass delimiter= if {delimiter!r} is not it, or collect lines that can't be read with "
        "with_exception_handling()",
        command=f"{quotes}, add --delimiter if {delimiter!r} is not it, or add --dead-letters FILE to set such lines "
        "aside",
    )


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds texts or bytes, so that any value fits."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_(kind) for is_ in (*tests, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view))


def skip(stream: Any, position: int) -> None:
    """Go to a position of a stream that was just opened."""
    if isinstance(stream, pa.NativeFile) and stream.seekable():
        stream.seek(position)
        return
    while position and (data := stream.read(min(position, TEXT_BYTES))):
        position -= len(data)
