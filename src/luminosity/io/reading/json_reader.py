"""JSON lines: one object per line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pyarrow import compute

from luminosity.errors import Fix, TableError
from luminosity.io.reading.find_files import TableFile, open_text
from luminosity.io.reading.reader import ByteRange, Claim, Reader
from luminosity.io.reading.selection import Selection
from luminosity.io.reading.text_lines import (
    Doubts,
    LineNumbers,
    Report,
    Unreadable,
    head,
    line_chunks,
    line_end,
    raise_unreadable,
    readable_parts,
)

__all__ = ["JsonLinesReader", "json_lines_schema"]

_LONG_NUMBER = re.compile(rb":\s*\d{17,}\s*[,}]")  # a float may not hold it

pc: Any = compute  # It creates its functions on import, so type checkers see none.

_FIX = Fix(
    "pass schema= if there are more columns or other types, or collect lines that can't be read with "
    "with_exception_handling()",
    command="correct the line, or add --dead-letters FILE to set such lines aside",
)


class JsonLinesReader(Reader):
    """Reads JSON lines. A missing key is null. An unknown key is an error, unless columns are selected."""

    def __init__(self, file: TableFile, selection: Selection, report: Report) -> None:
        from pyarrow import json

        self._json = json
        self._file = file
        self._selection = selection
        self._report = _Reporter(file, f"; the columns are those of {selection.origin}", report)
        has_all = len(selection.loaded) == len(selection.stored)
        self._options = json.ParseOptions(
            explicit_schema=pa.schema([pa.field(field.name, _parsed_as(field.type)) for field in selection.loaded]),
            unexpected_field_behavior="error" if has_all else "ignore",
        )

    def cuts(self) -> list[int] | None:
        """Return None (anywhere), or no cuts if the file is compressed."""
        return None if self._file.compression is None else []

    def batches(self, byte_range: ByteRange, claim: Claim) -> Iterator[pa.RecordBatch]:
        """Parse the lines that begin in this range."""
        for position, data in line_chunks(self._file, 0, byte_range, claim):
            for table in readable_parts(data, line_end(data), self._parse, self._report.lines_at(position)):
                yield from table.combine_chunks().to_batches()

    def _parse(self, data: bytes) -> pa.Table:
        # One block for all lines: pyarrow refuses a line that is longer than a block.
        options = self._json.ReadOptions(block_size=max(1, len(data)))
        table = self._json.read_json(pa.BufferReader(data), options, self._options)
        columns = [
            _times(column, field.type) for column, field in zip(table.columns, self._selection.loaded, strict=True)
        ]
        return pa.table(columns, names=table.column_names).cast(self._selection.loaded)

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""


class _Reporter:
    """Reports lines that can't be read."""

    def __init__(self, file: TableFile, hint: str, report: Report) -> None:
        self._file = file
        self._hint = hint
        self._report = report
        self._numbers = LineNumbers(lambda: open_text(file))

    def lines_at(self, position: int) -> Callable[[int, bytes, Exception], None]:
        """Return a function that reports lines of a chunk that begins at ``position``."""

        def bad(at: int, line: bytes, error: Exception) -> None:
            text = line.decode(errors="backslashreplace").strip("\r\n")
            number = self._numbers.at(position + at)
            reason = f"{error}{self._hint}"
            self._report(Unreadable(self._file.path, number, position + at, text, reason, _FIX))

        return bad


def json_lines_schema(file: TableFile, report: Report, doubts: Doubts) -> pa.Schema | None:
    """Return the schema guessed from the first megabyte, or None if the file has no line.

    Lines that can't be read are reported, and do not count. Whole numbers above 64 bits are doubtful: they lose digits.
    """
    from pyarrow import json

    def parse(lines: bytes, schema: pa.Schema | None = None) -> pa.Table:
        reading = json.ReadOptions(block_size=max(1, len(lines)))
        return json.read_json(pa.BufferReader(lines), reading, json.ParseOptions(explicit_schema=schema))

    with open_text(file) as stream:
        data = head(stream)
    if not data.strip():
        return None
    try:
        found = parse(data).schema
    except pa.ArrowException:
        found = _common_schema(readable_parts(data, line_end(data), parse, lambda *_: None))
        hint = "; expected one object per line, with the same types in all"
        bad = _Reporter(file, hint, report if len(found) else raise_unreadable).lines_at(0)
        for _ in readable_parts(data, line_end(data), lambda lines: parse(lines, found), bad):
            pass
    if not len(found):
        raise TableError(
            f"{file.path}: found empty objects in the first lines, expected columns", fix=Fix("pass schema=")
        )
    if _LONG_NUMBER.search(data):
        for name in [each.name for each in found if pa.types.is_float64(each.type)]:
            wider = found.set(found.get_field_index(name), pa.field(name, pa.uint64()))
            try:
                parse(data, wider)
                found = wider
            except pa.ArrowException:
                if long := re.search(rb'"%s"\s*:\s*(-?\d{17,})\s*[,}]' % re.escape(name.encode()), data):
                    why = f"column {name!r} is read as numbers of 64 bits, in which {long[1].decode()} loses digits"
                    fix = Fix("write such numbers as texts", command="write such numbers as texts")
                    doubts(name, TableError(f"{file.path}: {why}", fix=fix))
    return pa.schema([pa.field(each.name, _unless_null(each.type)) for each in found])


def _common_schema(tables: Iterator[pa.Table]) -> pa.Schema:
    """Return a schema for lines that were parsed in parts; it leaves out parts that contradict earlier ones."""
    found = pa.schema([])
    for table in tables:
        try:
            found = pa.unify_schemas([found, table.schema], promote_options="permissive")
        except pa.ArrowException:
            continue
    return found


def _parsed_as(kind: pa.DataType) -> pa.DataType:
    """Return a type that pyarrow's parser knows and that can be cast to ``kind``. Dates and times are ISO 8601 texts.

    >>> _parsed_as(pa.struct({"v": pa.list_(pa.float32(), 2), "day": pa.date32()}))
    StructType(struct<v: list<item: float>, day: string>)
    """
    types = pa.types
    if types.is_fixed_size_list(kind) or types.is_large_list(kind) or types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_parsed_as(kind.value_type)))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_parsed_as(field.type)) for field in kind])
    if types.is_dictionary(kind):
        return _parsed_as(kind.value_type)
    if types.is_date(kind) or types.is_time(kind):
        return pa.string()
    if types.is_duration(kind):
        return pa.int64()
    return pa.float32() if types.is_float16(kind) else kind


def _times(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Convert texts to times of day by way of timestamps, since pyarrow can't cast them directly."""
    if not pa.types.is_time(kind):
        return column
    texts = pc.binary_join_element_wise(pa.scalar("1970-01-01"), column, pa.scalar(" "))
    return texts.cast(pa.timestamp(kind.unit)).cast(kind)


def _unless_null(kind: pa.DataType) -> pa.DataType:
    """Return text for a column of nulls so far, since a column of nulls could hold no later value."""
    return pa.string() if pa.types.is_null(kind) else kind
