"""CSV: a header, and rows of values as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from luminosity.errors import Fix, TableError
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.open_file import open_text
from luminosity.io.reading.reader import TEXT_BYTES, Claim, Reader, claim_whole
from luminosity.io.reading.selection import Selection
from luminosity.io.reading.text_lines import BYTE_ORDER_MARK, explain, head, line_chunks

__all__ = ["CsvReader", "CsvStyle", "csv_schema"]

_BLANK = re.compile(rb"^\r?\n", re.MULTILINE)
_HEADER_BYTES = 64 << 10  # longer than the header of any usual table

_FIX = Fix(
    "pass schema= for other types, null_values= for other nulls, newlines_in_values=True for values with line breaks",
    command="convert the table to Parquet, which stores its types, nulls and line breaks",
)


@dataclass(frozen=True)
class CsvStyle:
    """How the values of a CSV file are written."""

    delimiter: str = ","
    newlines_in_values: bool = False
    null_values: tuple[str, ...] = ("",)

    def parse_options(self, columns: int) -> Any:
        """Return pyarrow's options to parse a file with this many columns.

        Empty lines are ignored, except in a file with one column: there an empty line is a null.
        """
        from pyarrow import csv

        return csv.ParseOptions(
            delimiter=self.delimiter, newlines_in_values=self.newlines_in_values, ignore_empty_lines=columns != 1
        )

    def convert_options(self, schema: pa.Schema | None = None) -> Any:
        """Return pyarrow's options to convert values to the types of ``schema``.

        Quoted values are never null, so that nulls and empty texts are told apart.
        """
        from pyarrow import csv

        return csv.ConvertOptions(
            column_types=schema,
            include_columns=None if schema is None else schema.names,
            null_values=list(self.null_values),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )


class CsvReader(Reader):
    """Reads CSV in chunks of whole lines, or in one piece if values contain line breaks."""

    def __init__(self, file: TableFile, selection: Selection, style: CsvStyle) -> None:
        from pyarrow import csv

        self._csv = csv
        self._file = file
        self._selection = selection
        self._style = style
        self._header, self._first = _header(head(file, _HEADER_BYTES), style)
        if self._header:
            expected = {field.name: field.type for field in selection.stored}
            selection.check(file.path, pa.schema([(name, expected.get(name, pa.string())) for name in self._header]))
        self._parsing = style.parse_options(len(self._header))
        self._converting = style.convert_options(selection.loaded)
        self._hint = f"the types are those of {selection.origin}"

    def cuts(self) -> list[int] | None:
        """Return None (anywhere), or no cuts if the file is compressed or values contain line breaks."""
        return None if self._file.compression is None and not self._style.newlines_in_values else []

    def batches(self, start: int, stop: int, claim: Claim) -> Iterator[pa.RecordBatch]:
        """Parse the lines that begin in this range, or the whole file if values contain line breaks."""
        if not self._header:
            return
        if self._style.newlines_in_values:
            if claim_whole(start, claim):
                yield from self._whole()
            return
        for position, data in line_chunks(self._file, self._first, start, stop, claim):
            try:
                table = self._parse(data)
            except (pa.ArrowException, TableError) as error:
                raise explain(self._file, position, data, self._parse, error, self._hint, _FIX) from error
            yield from table.combine_chunks().to_batches()

    def _whole(self) -> Iterator[pa.RecordBatch]:
        """Read the file from its beginning: only so it is known which line breaks are inside values."""
        reading = self._csv.ReadOptions(block_size=TEXT_BYTES)
        with open_text(self._file) as stream:
            try:
                yield from self._csv.open_csv(stream, reading, self._parsing, self._converting)
            except pa.ArrowException as error:
                raise TableError(f"{self._file.path}: {self._with_name(error)}; {self._hint}", fix=_FIX) from error

    def _parse(self, data: bytes) -> pa.Table:
        table = self._read(data, self._converting)
        if b'"' in data and (self._has_more_lines(data, table.num_rows) or self._ends_in_quotes(data, table.num_rows)):
            raise TableError("a value begins in one line and ends in another")
        return table

    def _read(self, data: bytes, converting: Any) -> pa.Table:
        # One block for all lines: pyarrow refuses a line that is longer than a block.
        reading = self._csv.ReadOptions(column_names=self._header, block_size=max(1, len(data)))
        try:
            return self._csv.read_csv(pa.BufferReader(data), reading, self._parsing, converting)
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(self._with_name(error)) from error

    def _with_name(self, error: pa.ArrowException) -> str:
        """Return the message with the column's name instead of Arrow's number."""
        return re.sub(r"In CSV column #(\d+)", lambda found: f"column {self._header[int(found[1])]!r}", str(error))

    def _has_more_lines(self, data: bytes, rows: int) -> bool:
        """Return whether there are more lines than rows, not counting blank lines, which are slow to find."""
        is_last_whole = not data[data.rfind(b"\n") + 1 :].strip(b"\r")
        lines = data.count(b"\n") + (not is_last_whole)
        return lines > rows and (len(self._header) == 1 or lines - len(_BLANK.findall(data)) > rows)

    def _ends_in_quotes(self, data: bytes, rows: int) -> bool:
        """Return whether the data ends inside a quoted value, which would then contain one more line."""
        if data.count(b'"') % 2 == 0:
            return False
        line = self._style.delimiter.join("x" for _ in self._header).encode()
        as_text = CsvStyle().convert_options(pa.schema([(self._header[0], pa.string())]))
        return self._read(data + b"\n" + line + b"\n", as_text).num_rows == rows

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""


def csv_schema(file: TableFile, style: CsvStyle) -> pa.Schema | None:
    """Return the names in the header with types guessed from the first megabyte, or None without a header."""
    from pyarrow import csv

    data = head(file)
    names, _ = _header(data, style)
    if not names:
        return None
    reading = csv.ReadOptions(block_size=len(data) + 1)
    table = csv.read_csv(
        pa.BufferReader(data + b"\n"), reading, style.parse_options(len(names)), style.convert_options()
    )
    # A column without values so far becomes text, which can hold any later value.
    return pa.schema([(each.name, pa.string() if pa.types.is_null(each.type) else each.type) for each in table.schema])


def _header(data: bytes, style: CsvStyle) -> tuple[list[str], int]:
    """Return the names in the first line that is not blank, and the position of the next line."""
    from pyarrow import csv

    start = len(BYTE_ORDER_MARK) if data.startswith(BYTE_ORDER_MARK) else 0
    while start < len(data):
        stop = data.find(b"\n", start) + 1 or len(data)
        line = data[start:stop]
        if line.strip():
            found = csv.read_csv(pa.BufferReader(line + b"\n"), parse_options=style.parse_options(len(line)))
            return found.column_names, stop
        start = stop
    return [], start
