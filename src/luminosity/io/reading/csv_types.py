"""The types of CSV's columns, guessed from the first rows, and which of the guesses are in doubt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute

from luminosity._shared.text import list_some
from luminosity.errors import Fix, TableError
from luminosity.io.reading.csv_dialect import NULL_MARKS, CsvDialect, CsvStyle, recognise_dialect
from luminosity.io.reading.csv_reader import CsvParser, is_text, skip
from luminosity.io.reading.csv_rows import CsvRows, find_rows
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.text_lines import Doubts, Report

__all__ = ["count_first_rows", "csv_schema"]

pc: Any = compute  # It creates its functions on import, so type checkers see none.

_SCHEMA_BYTES = 1 << 20  # enough rows to guess types from
_NUMBER = r"[-+]?(?:\d+%s?\d*|%s\d+)(?:[eE][-+]?\d+)?"
_WHOLE = r"[-+]?\d+"
_TIME = r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[-+]\d\d:?\d\d)?)?"
_THOUSANDS = r"[-+]?\d{1,3}(?:,\d{3})+"
_PADDED = r"0\d+"  # codes such as 01234, which would lose their zeros
_EXACT = 2.0**53  # a float holds whole numbers below it
_ENOUGH = 0.8  # the share of numbers that makes a column of texts doubtful, if the other values are few different ones
_NEARLY_ALL = 0.99  # the share that does, whatever the other values are
_FEW_TEXTS = 5  # different values: marks of nulls are few, product codes are many
_SHOWN_TEXTS = 3  # in a message


def csv_schema(file: TableFile, style: CsvStyle, report: Report, doubts: Doubts) -> pa.Schema | None:
    """Return the names in the header with types guessed from the first megabyte, or None without a header.

    Lines that can't be read are reported, and do not count for the types.
    """
    dialect = recognise_dialect(file, style)
    if not dialect.header:
        return None
    rows, is_all = _first_rows(file, dialect)
    sample = _Sample(dialect, style, b"".join(rows.data[start:stop] for start, stop in _between(rows)))
    kinds = dict(zip(sample.texts.column_names, sample.texts.schema.types, strict=True))
    if len(kinds) == len(dialect.header):  # otherwise names repeat, which is refused later
        kinds |= sample.types_with_marks()
        codes = sample.codes(kinds)
        for name, why in codes.items():
            doubts(name, TableError(f"{file.path}: column {name!r} is text {why}"))
            kinds[name] = pa.string()
        guess = _Guess(file, style, has_all=is_all)
        for name in (name for name, kind in kinds.items() if pa.types.is_string(kind) and name not in codes):
            if doubt := guess.doubt(name, sample.texts.column(name).drop_null()):
                doubts(name, doubt)
    # A column without values so far becomes text, which can hold any later value.
    schema = pa.schema([(name, _or_text(kinds[name])) for name in dialect.header])
    if rows.faults or sample.skipped or any(pa.types.is_binary(kind) for kind in kinds.values()):
        parser = CsvParser(file, dialect, style, schema, file.path, report)
        for _ in parser.tables(dialect.first, rows):
            pass
    return schema


class _Sample:
    """The first rows of a file, without those that have another number of values than the header.

    ``texts`` is the table in which only empty values, and those that the user names, are null.
    """

    def __init__(self, dialect: CsvDialect, style: CsvStyle, data: bytes) -> None:
        self._dialect = dialect
        self._style = style
        self._data = dialect.to_utf8(data) + b"\n"
        self.skipped = False
        self.texts = self._table(style.convert_options())

    def _table(self, converting: Any) -> pa.Table:
        from pyarrow import csv

        def leave_out(_: Any) -> str:
            self.skipped = True
            return "skip"

        parsing = self._dialect.parse_options()
        parsing.invalid_row_handler = leave_out
        reading = csv.ReadOptions(column_names=self._dialect.header, block_size=len(self._data))
        return csv.read_csv(pa.BufferReader(self._data), reading, parsing, converting)

    def types_with_marks(self) -> dict[str, pa.DataType]:
        """Return the types of columns of texts in which marks of nulls stand beside numbers, times or booleans."""
        converting = self._style.typed_options()
        converting.include_columns = [field.name for field in self.texts.schema if pa.types.is_string(field.type)]
        if not converting.include_columns:
            return {}
        found = self._table(converting).schema
        return {field.name: field.type for field in found if not (is_text(field.type) or pa.types.is_null(field.type))}

    def codes(self, kinds: Mapping[str, pa.DataType]) -> dict[str, str]:
        """Return the columns whose whole numbers would not come back as they are written, and why."""
        names = [name for name, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_floating(kind)]
        if not names or not (self._has_padded() or any(self._may_be_large(name, kinds[name]) for name in names)):
            return {}
        found = self._table(self._style.typed_options(pa.schema([(name, pa.string()) for name in names])))
        codes: dict[str, str] = {}
        for name, column in zip(found.column_names, found.columns, strict=True):
            values = column.drop_null()
            if not pc.all(_matches(values, _WHOLE)).as_py():
                continue
            padded = values.filter(_matches(values, _PADDED))
            if len(padded):
                codes[name] = f"because of leading zeros, such as {padded[0].as_py()!r}"
            elif pa.types.is_floating(kinds[name]):
                lengths = pc.utf8_length(values)
                longest = values[pc.index(lengths, pc.max(lengths)).as_py()].as_py()
                codes[name] = f"because numbers of 64 bits can't hold {longest!r}"
        return codes

    def _has_padded(self) -> bool:
        """Return whether a value may begin with a zero and another digit, by a quick look at the bytes."""
        found = np.frombuffer(b"\n" + self._data, np.uint8)
        zeros = np.flatnonzero(found[:-1] == ord("0"))
        before, after = found[zeros - 1], found[zeros + 1]
        begins = np.isin(before, np.frombuffer(f'{self._dialect.delimiter}" \n'.encode(), np.uint8))
        return bool((begins & (after >= ord("0")) & (after <= ord("9"))).any())

    def _may_be_large(self, name: str, kind: pa.DataType) -> bool:
        column = self.texts.column(name)
        if not pa.types.is_floating(column.type):
            return pa.types.is_floating(kind)
        return (pc.max(pc.abs(column)).as_py() or 0.0) >= _EXACT


class _Guess:
    """Says which columns of texts were most likely meant to be something else."""

    def __init__(self, file: TableFile, style: CsvStyle, *, has_all: bool) -> None:
        self._path = file.path
        self._has_comma = style.decimal_point == ","
        self._of = "of" if has_all else "of the first"

    def doubt(self, name: str, values: Any) -> TableError | None:
        """Return what is doubtful about a column of texts, if nearly all of its values are numbers or times."""
        values = values.filter(pc.invert(pc.is_in(values, pa.array(["", *NULL_MARKS]))))
        if not len(values):
            return None
        begun = f"{self._path}: column {name!r} is text because of"
        point = "[,]" if self._has_comma else "[.]"
        for what, pattern in (("numbers", _NUMBER % (point, point)), ("times", _TIME)):
            others = values.filter(pc.invert(_matches(values, pattern)))
            if not len(others) and what == "times":
                return TableError(f"{begun} times in several forms: {values[0].as_py()!r} is the first")
            if len(others) and _are_few(others, values):
                counts = {each["values"]: each["counts"] for each in pc.value_counts(others).to_pylist()}
                texts = sorted(counts, key=lambda text: (-counts[text], text))
                shown = list_some([repr(text) for text in texts], _SHOWN_TEXTS)
                return TableError(
                    f"{begun} {shown} in {len(others):,} {self._of} {len(values):,} values; the others are {what}",
                    fix=Fix(
                        f"pass null_values={['', *texts[:_SHOWN_TEXTS]]!r} if that means null",
                        command=f"add --null-values '{','.join(texts[:_SHOWN_TEXTS])}' if that means null",
                    ),
                )
        commas = pc.and_(
            pc.match_substring(values, ","), _matches(values, f"{_NUMBER % ('[.,]', '[.,]')}|{_THOUSANDS}")
        )
        numbers = pc.or_(commas, _matches(values, _NUMBER % ("[.]", "[.]")))
        if self._has_comma or not pc.any(commas).as_py() or not _are_few(values.filter(pc.invert(numbers)), values):
            return None
        written = values.filter(commas)
        if pc.all(_matches(written, _THOUSANDS)).as_py():
            fix = Fix("write the numbers without them", command="write the numbers without them")
            return TableError(f"{begun} commas between thousands, such as {written[0].as_py()!r}", fix=fix)
        return TableError(
            f"{begun} decimal commas, such as {written[0].as_py()!r}",
            fix=Fix("pass decimal_point=',' to read numbers", command="add --decimal-comma to read numbers"),
        )


def _are_few(others: Any, values: Any) -> bool:
    """Return whether the other values are so few that the column was most likely meant to have none of them."""
    share = len(others) / len(values)
    return share <= 1 - _NEARLY_ALL or (share <= 1 - _ENOUGH and len(pc.unique(others)) <= _FEW_TEXTS)


def _matches(values: Any, pattern: str) -> Any:
    return pc.match_substring_regex(values, f"^ *(?:{pattern}) *$")


def _or_text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_null(kind) or pa.types.is_binary(kind) else kind


def _first_rows(file: TableFile, dialect: CsvDialect) -> tuple[CsvRows, bool]:
    """Return the first rows of a file, and whether these are all."""
    size = _SCHEMA_BYTES
    while True:
        with dialect.open(file) as stream:
            skip(stream, dialect.first)
            data, is_last = b"", False
            while len(data) < size and not is_last:
                more = stream.read(size - len(data))
                data, is_last = data + more, not more
        rows = find_rows(data, dialect.delimiter, is_last)
        if rows.end or is_last:
            return rows, is_last
        size *= 8


def count_first_rows(file: TableFile, style: CsvStyle) -> tuple[int, int] | None:
    """Return the number of rows at the beginning of a file and their bytes, or None if bytes tell nothing."""
    dialect = recognise_dialect(file, style)
    if file.compression is not None or not dialect.can_be_cut:
        return None
    rows, count, at = _first_rows(file, dialect)[0], 0, 0
    while at < rows.end:
        at = rows.cut_at(at + 1)
        count += 1
    return count, rows.end + dialect.first


def _between(rows: CsvRows) -> Iterator[tuple[int, int]]:
    """Yield the stretches of complete rows between the faults."""
    at = 0
    for start, stop in rows.faults:
        yield at, start
        at = stop
    yield at, rows.end
