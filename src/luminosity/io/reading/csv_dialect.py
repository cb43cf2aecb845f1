"""How a CSV file is written: its encoding, its delimiter and its header, recognised by its first rows."""

from __future__ import annotations

import codecs
import csv
import functools
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from luminosity._shared.text import did_you_mean, shorten_repr
from luminosity.errors import Fix, TableError
from luminosity.io.formats import Format
from luminosity.io.reading.csv_rows import find_rows
from luminosity.io.reading.find_files import TableFile, open_text

__all__ = ["NULL_MARKS", "CsvDialect", "CsvStyle", "encoding_fix", "likely_encoding", "recognise_dialect"]

NULL_MARKS = ("#N/A", "#N/A N/A", "#NA", "<NA>", "N/A", "NA", "NULL", "None", "n/a", "null")
"""Texts that mean null in columns of numbers, times and booleans, as in pandas. In a column of texts they stay texts:
``NA`` may be Namibia. ``nan`` is a number."""

_HEAD_BYTES = 64 << 10  # enough rows to recognise a delimiter by, and longer than the header of any usual table
_MOST_HEADER_BYTES = 32 << 20
_DELIMITERS = "\t,;|"  # in the order in which they are preferred if two of them fit equally well
_EXCEL_HINT = re.compile(r"sep=(.)\r?\n", re.IGNORECASE)  # the first line that Excel reads, and some programs write
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is its beginning
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_UNREADABLE = "luminosity.unreadable"  # the name of the error handler below
_LETTERS = (
    ("cp1251", re.compile("[\u0401\u0410-\u044f\u0451]{3,}")),  # Cyrillic: every letter of a word is above ASCII
    ("cp1252", re.compile("[\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u00ff\u0152\u0153\u0160\u0161\u2013-\u2026\u20ac]")),
)
_SHOWN_BYTES = 80  # of a header that can't be decoded
_ENOUGH_ROWS = 0.5  # the share of rows that a delimiter must fit


@dataclass(frozen=True)
class CsvStyle:
    """What the user says about the CSV files of a table; None is recognised for each file."""

    delimiter: str | None = None
    encoding: str | None = None
    newlines_in_values: bool = True
    null_values: tuple[str, ...] = ("",)
    decimal_point: str = "."

    def __post_init__(self) -> None:
        if self.decimal_point not in (".", ","):
            raise TableError(f"found decimal_point={self.decimal_point!r}, expected '.' or ','")
        if self.delimiter is not None and (
            len(self.delimiter) != 1 or not self.delimiter.isascii() or self.delimiter in '"\r\n'
        ):
            raise TableError(f"found delimiter={self.delimiter!r}, expected one ASCII character, such as ';' or '\\t'")
        if self.encoding is not None:
            _check_encoding(self.encoding)

    def convert_options(self, schema: pa.Schema | None = None) -> Any:
        """Return pyarrow's options to convert values to the types of ``schema``.

        Quoted values are never null, so that nulls and empty texts are told apart.
        """
        return self._options(schema, self.null_values, quoted_too=False)

    def typed_options(self, schema: pa.Schema | None = None) -> Any:
        """Return the options for columns of numbers, times or booleans: there :data:`NULL_MARKS` are null, too.

        So are quoted values: ``""`` is no number.
        """
        return self._options(schema, (*self.null_values, *NULL_MARKS), quoted_too=True)

    def _options(self, schema: pa.Schema | None, null_values: Sequence[str], *, quoted_too: bool) -> Any:
        from pyarrow import csv as arrow_csv

        return arrow_csv.ConvertOptions(
            column_types=schema,
            include_columns=None if schema is None else schema.names,
            null_values=list(null_values),
            strings_can_be_null=True,
            quoted_strings_can_be_null=quoted_too,
            decimal_point=self.decimal_point,
        )


@dataclass(frozen=True)
class CsvDialect:
    """How one file is written. ``first`` is the position of the first row behind the header."""

    delimiter: str
    encoding: str
    header: tuple[str, ...]
    first: int
    ends_lines_with_cr: bool = False  # alone, as the Macintosh did

    @property
    def can_be_cut(self) -> bool:
        """Whether lines, quotes and delimiters are the bytes that they are in ASCII; if not, the file is transcoded."""
        return _is_like_ascii(self.encoding) and not self.ends_lines_with_cr

    def parse_options(self) -> Any:
        """Return pyarrow's options to parse rows.

        Empty lines are ignored, except in a file with one column: there an empty line is a null.
        """
        from pyarrow import csv as arrow_csv

        return arrow_csv.ParseOptions(
            delimiter=self.delimiter, newlines_in_values=True, ignore_empty_lines=len(self.header) != 1
        )

    def open(self, file: TableFile) -> Any:
        """Open the file. Positions in it are those in its bytes, or in UTF-8 if the file can't be cut."""
        stream = open_text(file)
        return stream if self.can_be_cut else _Transcoded(stream, self.encoding, self.ends_lines_with_cr)

    def to_utf8(self, data: bytes) -> bytes:
        """Return rows that were read with :meth:`open` as UTF-8; bytes that can't be decoded stay invalid."""
        if self.encoding == "utf-8" or not self.can_be_cut:
            return data
        return data.decode(self.encoding, _UNREADABLE).encode("utf-8", "surrogateescape")


def recognise_dialect(file: TableFile, style: CsvStyle, names: Sequence[str] = ()) -> CsvDialect:
    """Recognise how a file is written, from its first rows; ``names`` are the expected columns, if they are known.

    The header is empty if the file is.
    """
    size = _HEAD_BYTES
    while True:
        raw, is_all = _head(file, size)
        encoding = _normal(style.encoding) if style.encoding else _encoding_of(raw)
        ends_with_cr = _is_like_ascii(encoding) and b"\r" in raw and b"\n" not in raw
        if ends_with_cr or not _is_like_ascii(encoding):
            raw = _to_utf8(codecs.getincrementaldecoder(encoding)(_UNREADABLE).decode(raw), ends_with_cr)
            text = raw.decode("utf-8", "surrogateescape")
        else:
            text = raw.decode(encoding, _UNREADABLE)
        start = len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0
        text = text.removeprefix("\ufeff")
        hint = _EXCEL_HINT.match(text)
        if hint:
            text, start = text[hint.end() :], start + hint.end()
        delimiter = style.delimiter or _delimiter(file, text, is_all, hint[1] if hint else None, names)
        while start < len(raw) and not raw[start : raw.find(b"\n", start) + 1 or len(raw)].strip():
            start = raw.find(b"\n", start) + 1 or len(raw)
        stop = start + find_rows(raw[start:], delimiter, is_all).cut_at(1)
        if stop > start or is_all or size > _MOST_HEADER_BYTES:
            break
        size *= 8
    header = _header(file, raw[start:stop], delimiter, encoding, ends_with_cr)
    return CsvDialect(delimiter, encoding, header, stop, ends_with_cr)


def encoding_fix(data: bytes) -> Fix:
    """Return the advice for bytes that can't be decoded."""
    likely = likely_encoding(data)
    if likely is None:
        return Fix("pass encoding=", command="add --encoding NAME")
    return Fix(
        f"pass encoding={likely!r} if that is its encoding", command=f"add --encoding {likely} if that is its encoding"
    )


def likely_encoding(data: bytes) -> str | None:
    r"""Return the encoding in which a text that is not UTF-8 most likely is, or None.

    >>> likely_encoding("Zürich, Genève".encode("cp1252"))
    'cp1252'
    >>> likely_encoding("\u041f\u0440\u0438\u0432\u0435\u0442".encode("cp1251"))
    'cp1251'
    """
    for encoding, letters in _LETTERS:
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        others = sum(character > "\x7f" for character in text)
        if others and sum(len(found) for found in letters.findall(text)) >= 0.8 * others:
            return encoding
    return None


def _head(file: TableFile, size: int) -> tuple[bytes, bool]:
    """Return the first bytes of the file, and whether these are all."""
    data = b""
    with open_text(file) as stream:
        while len(data) <= size and (more := stream.read(size + 1 - len(data))):
            data += more
    return data[:size], len(data) <= size


def _header(file: TableFile, line: bytes, delimiter: str, encoding: str, is_utf8: bool) -> tuple[str, ...]:
    """Return the names of the columns, or none for an empty file."""
    from pyarrow import csv as arrow_csv

    text = line.decode("utf-8" if is_utf8 or not _is_like_ascii(encoding) else encoding, _UNREADABLE)
    if not text.strip():
        return ()
    if "\udcff" in text or "\0" in text:
        shown = shorten_repr(line, _SHOWN_BYTES)
        raise TableError(
            f"{file.path}: found bytes that are not {encoding} in the header {shown}", fix=encoding_fix(line)
        )
    data = text.encode() + b"\n"
    reading = arrow_csv.ReadOptions(block_size=len(data))
    parsing = arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    return tuple(arrow_csv.read_csv(pa.BufferReader(data), reading, parsing).column_names)


def _delimiter(file: TableFile, text: str, is_all: bool, hint: str | None, names: Sequence[str]) -> str:
    """Return the delimiter that fits the first rows, or a comma if none does."""
    if hint is not None:
        return hint
    if file.format is Format.TSV:
        return "\t"
    rows = {delimiter: _first_rows(text, delimiter, is_all) for delimiter in _DELIMITERS}
    for delimiter, found in rows.items():
        if len(names) > 1 and found and sorted(found[0]) == sorted(names):
            return delimiter
    by_fit = {delimiter: _fit(found, delimiter, text) for delimiter, found in rows.items()}
    best = max(by_fit, key=by_fit.__getitem__)
    return best if by_fit[best] > (0, 0, 0) else ","


def _fit(rows: list[list[str]], delimiter: str, text: str) -> tuple[float, float, int]:
    """Return how well a delimiter fits: the more, the better, and zeros if it does not.

    Most rows must have as many values as the header, or at least several. A delimiter is rarely followed by a space.
    """
    if not rows or len(rows[0]) < 2:
        return 0, 0, 0
    spaces = -text.partition("\n")[0].count(delimiter + " ")
    if len(rows) == 1:
        return 1, 1, spaces
    count = len(rows) - 1
    same = sum(len(row) == len(rows[0]) for row in rows[1:]) / count
    several = sum(len(row) > 1 for row in rows[1:]) / count
    return (same, several, spaces) if several >= _ENOUGH_ROWS else (0, 0, 0)


def _first_rows(text: str, delimiter: str, is_all: bool) -> list[list[str]]:
    rows: list[list[str]] = []
    try:
        rows.extend(row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row)
    except csv.Error:  # such as a value that is too long, which ends these rows
        is_all = False
    return rows if is_all or len(rows) < 2 else rows[:-1]  # The last row may be cut off.


def _encoding_of(data: bytes) -> str:
    """Return the encoding that a byte-order mark names, or UTF-16 if every other byte is zero, or UTF-8."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return encoding
    line = data[: data.find(b"\n") + 1] or data
    for offset, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        if len(line) > 3 and not any(line[offset : len(line) - 1 : 2]) and all(line[1 - offset : len(line) - 1 : 2]):
            return encoding
    return "utf-8"


def _check_encoding(name: str) -> None:
    try:
        is_text = codecs.lookup(name)._is_text_encoding  # pyright: ignore  # what bytes.decode() asks, too
    except LookupError:
        is_text = False
    if not is_text:
        near = did_you_mean(name, ["utf-8", "utf-16", "cp1252", "latin-1", "cp1250", "cp1251", "shift_jis", "gb18030"])
        raise TableError(
            f"found encoding={name!r}, expected an encoding that Python knows, such as 'cp1252' or 'utf-16'",
            fix=near or None,
        )


def _normal(name: str) -> str:
    """Return Python's name of an encoding; a byte-order mark of UTF-8 is skipped in any case."""
    found = codecs.lookup(name).name
    return "utf-8" if found in ("utf-8", "utf-8-sig", "ascii") else found


@functools.lru_cache(maxsize=64)
def _is_like_ascii(encoding: str) -> bool:
    ascii_bytes = bytes(range(128))
    try:
        return ascii_bytes.decode(encoding) == ascii_bytes.decode("ascii")
    except UnicodeError:
        return False


def _mark_unreadable(error: UnicodeError) -> tuple[str, int]:
    """Decode what can't be decoded as a character that becomes the byte 255, which is never UTF-8."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\udcff", error.end


codecs.register_error(_UNREADABLE, _mark_unreadable)


def _to_utf8(text: str, ends_lines_with_cr: bool) -> bytes:
    return (text.replace("\r", "\n") if ends_lines_with_cr else text).encode("utf-8", "surrogateescape")


class _Transcoded:
    """A stream of UTF-8, made from a stream in another encoding. It can't seek."""

    def __init__(self, stream: Any, encoding: str, ends_lines_with_cr: bool) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)(_UNREADABLE)
        self._ends_lines_with_cr = ends_lines_with_cr
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes of UTF-8, and none only at the end."""
        while not self._rest:
            raw = self._stream.read(size)
            self._rest = _to_utf8(self._decoder.decode(raw, final=not raw), self._ends_lines_with_cr)
            if not raw:
                break
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    def __enter__(self) -> _Transcoded:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
