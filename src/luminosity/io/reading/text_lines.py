"""Lines of text in chunks: which lines belong to a range of bytes, and which of them can't be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from luminosity._shared.text import shorten
from luminosity.errors import Fix, TableError
from luminosity.io.reading.find_files import TableFile, open_text
from luminosity.io.reading.reader import EVERYTHING, TEXT_BYTES, ByteRange, Claim, claim_whole

__all__ = [
    "LETTERS",
    "Doubts",
    "LineNumbers",
    "Report",
    "Unreadable",
    "head",
    "letters",
    "line_chunks",
    "line_end",
    "raise_unreadable",
    "readable_parts",
]

LETTERS = pa.schema({"_file": pa.string(), "_line": pa.int64(), "_text": pa.string(), "_reason": pa.string()})
"""The columns of dead letters: lines that can't be read."""

_HEAD_BYTES = 1 << 20  # enough rows to guess types from
_READ_AHEAD = 64 << 10  # bytes behind the range, which most likely contain the end of its last line
_MOST_BYTES_TO_COUNT = 1 << 30  # counting the lines before a fault reads the file up to it
_SHOWN_CHARACTERS = 120  # of the line at fault


@dataclass(frozen=True)
class Unreadable:
    """A line that can't be read, or a row of several lines; ``line`` is None deep in a large file.

    Also a file that is a row, or the members of an archive that are one: these have no position. ``text`` is then the
    key of the members, and None for a whole file.
    """

    path: str
    line: int | None
    position: int | None
    text: str | None
    reason: str
    fix: Fix | None = None

    @property
    def place(self) -> str:
        """The file and the line, in words."""
        if self.position is None:
            return self.path if self.text is None else f"{self.path}, key {self.text}"
        return f"{self.path}, " + (f"byte {self.position}" if self.line is None else f"line {self.line}")

    def error(self) -> TableError:
        """Return the error that ends a run without dead letters."""
        if self.position is None or self.text is None:
            return TableError(f"{self.place}: {self.reason}", fix=self.fix)
        shown = shorten(self.text, _SHOWN_CHARACTERS)
        return TableError(f"{self.place}: {self.reason}; the line is {_quoted(shown)}", fix=self.fix)


def _quoted(text: str) -> str:
    r"""Return ``repr(text)``, but backslashes as they are: they may stand for bytes that can't be decoded.

    >>> print(_quoted(b"K\xf6ln".decode("utf-8", "backslashreplace")))
    'K\xf6ln'
    """
    return repr(text).replace("\\\\", "\\")


Doubts = Callable[[str, TableError], None]
"""Takes the name of a column whose type may not be what the user wants, and an error that says why."""

Report = Callable[[Unreadable], None]
"""Takes a line that can't be read: it raises, or keeps the line as a dead letter."""


def raise_unreadable(line: Unreadable) -> None:
    """Raise the error of a line that can't be read."""
    raise line.error()


def letters(lines: Sequence[Unreadable]) -> pa.RecordBatch:
    """Return lines that can't be read as a record batch of dead letters."""
    return pa.RecordBatch.from_pylist(
        [{"_file": each.path, "_line": each.line, "_text": each.text, "_reason": each.reason} for each in lines],
        schema=LETTERS,
    )


class LineNumbers:
    """Counts the lines before positions in a file, which ``opened`` opens. Ascending positions are counted once."""

    def __init__(self, opened: Callable[[], Any]) -> None:
        self._opened = opened
        self._position = 0
        self._count = 1

    def at(self, position: int) -> int | None:
        """Return the number of the line at ``position``, or None deep in a large file."""
        if position > _MOST_BYTES_TO_COUNT:
            return None
        if position < self._position:
            self._position, self._count = 0, 1
        with self._opened() as stream:
            at = 0
            if self._position and isinstance(stream, pa.NativeFile) and stream.seekable():
                stream.seek(self._position)
                at = self._position
            while at < position and (data := stream.read(min(TEXT_BYTES, position - at))):
                self._count += data.count(b"\n", max(0, self._position - at))
                at += len(data)
        self._position = position
        return self._count


def head(stream: Any, size: int = _HEAD_BYTES) -> bytes:
    """Return the first whole lines of a stream, about ``size`` bytes, or all of a shorter one."""
    data = b""
    while more := stream.read(size):
        data += more
        if len(data) >= size and data.strip().find(b"\n") >= 0:
            return data[: data.rfind(b"\n") + 1]
    return data


def line_chunks(file: TableFile, first: int, byte_range: ByteRange, claim: Claim) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines that begin in the range, in chunks with their positions.

    The first line of the file is at ``first``. A compressed file can't be read from its middle, so the range with its
    first byte reads all of it.
    """
    if file.compression is None:
        with open_text(file) as stream:
            yield from _chunks(stream, _seek(stream, first, byte_range.start), byte_range.stop, claim)
    elif claim_whole(byte_range.start, claim):
        with open_text(file) as stream:
            stream.read(first)
            yield from _chunks(stream, first, EVERYTHING, lambda position: position)


def _seek(stream: pa.NativeFile, first: int, start: int) -> int:
    """Go to the first line that begins at or behind ``start``, and return its position."""
    if start <= first:
        stream.seek(first)
        return first
    position = start - 1
    stream.seek(position)
    while data := stream.read(_READ_AHEAD):
        newline = data.find(b"\n")
        if newline >= 0:
            stream.seek(position + newline + 1)
            return position + newline + 1
        position += len(data)
    return position


def _chunks(stream: pa.NativeFile, position: int, stop: int, claim: Claim) -> Iterator[tuple[int, bytes]]:
    begun = b""
    while True:
        read = stream.read(min(TEXT_BYTES, max(stop - position - len(begun), 0) + _READ_AHEAD))
        data = begun + read
        end = data.rfind(b"\n", len(begun)) + 1 if read else len(data)
        if not data:
            return
        if not end:
            begun = data  # The line is longer than a chunk.
            continue
        granted = claim(position + end) - position
        if granted <= 0:
            return
        if granted < end:
            end = data.find(b"\n", granted - 1, end) + 1 or end
        yield position, data[:end]
        if granted < end or not read:
            return
        position, begun = position + end, data[end:]


def line_end(data: bytes) -> Callable[[int], int]:
    """Return a function that finds the first end of a line at a position or behind it."""

    def cut_at(position: int) -> int:
        return data.find(b"\n", position - 1) + 1 or len(data)

    return cut_at


def readable_parts(
    data: bytes,
    cut_at: Callable[[int], int],
    parse: Callable[[bytes], Any],
    bad: Callable[[int, bytes, Exception], None],
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Any]:
    """Yield what ``parse`` returns for all rows that can be read, and call ``bad`` for each row that can't.

    Rows that fail are found by bisection. ``cut_at`` finds the end of a row, as :meth:`CsvRows.cut_at` does.
    """
    stop = len(data) if stop is None else stop
    if start >= stop:
        return
    try:
        parsed = parse(data[start:stop])
    except (pa.ArrowException, TableError) as error:
        first = cut_at(start + 1)
        if first >= stop:
            bad(start, data[start:stop], error)
            return
        middle = cut_at((start + stop + 1) // 2)
        if middle >= stop:  # One row has the second half: cut before it.
            middle = first
            while (end := cut_at(middle + 1)) < stop:
                middle = end
        yield from readable_parts(data, cut_at, parse, bad, start, middle)
        yield from readable_parts(data, cut_at, parse, bad, middle, stop)
    else:
        yield parsed
