"""Lines of text in chunks: which lines belong to a range of bytes, and which line a parser fails on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from luminosity.errors import Fix, TableError
from luminosity.io.reading.byte_ranges import EVERYTHING
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.open_file import open_text
from luminosity.io.reading.reader import TEXT_BYTES, Claim, claim_whole

__all__ = ["BYTE_ORDER_MARK", "explain", "head", "line_chunks"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HEAD_BYTES = 1 << 20  # enough rows to guess types from
_READ_AHEAD = 64 << 10  # bytes behind the range, which most likely contain the end of its last line
_MOST_BYTES_TO_COUNT = 1 << 30  # counting the lines before a fault reads the file up to it
_SHOWN_BYTES = 120  # of the line at fault


def head(file: TableFile, size: int = _HEAD_BYTES) -> bytes:
    """Return the first whole lines of the file, about ``size`` bytes, or all of a shorter file."""
    data = b""
    with open_text(file) as stream:
        while more := stream.read(size):
            data += more
            if len(data) >= size and data.strip().find(b"\n") >= 0:
                return data[: data.rfind(b"\n") + 1]
    return data


def line_chunks(file: TableFile, first: int, start: int, stop: int, claim: Claim) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines that begin in the range, in chunks with their positions.

    The first line of the file is at ``first``. A compressed file can't be read from its middle, so the range with its
    first byte reads all of it.
    """
    if file.compression is None:
        with open_text(file) as stream:
            yield from _chunks(stream, _seek(stream, first, start), stop, claim)
    elif claim_whole(start, claim):
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


def explain(
    file: TableFile,
    position: int,
    data: bytes,
    parse: Callable[[bytes], Any],
    error: Exception,
    hint: str,
    fix: Fix | None = None,
) -> TableError:
    """Return an error that shows the line at fault, which is found by bisection; ``hint`` says what was expected."""
    lines = data.split(b"\n")
    while len(lines) > 1:
        middle = len(lines) // 2
        if _fails(parse, b"\n".join(lines[:middle])):
            lines = lines[:middle]
        elif _fails(parse, b"\n".join(lines[middle:])):
            position += sum(map(len, lines[:middle])) + middle
            lines = lines[middle:]
        else:
            return TableError(f"{file.path}, from {_place(file, position)} on: {error}; {hint}", fix=fix)
    try:
        parse(lines[0] + b"\n")
    except (pa.ArrowException, TableError) as error_of_line:
        error = error_of_line
    shown = lines[0][:_SHOWN_BYTES].decode(errors="replace").strip()
    message = f"{file.path}, {_place(file, position)}: {error}; the line begins with {shown!r}; {hint}"
    return TableError(message, fix=fix)


def _fails(parse: Callable[[bytes], Any], data: bytes) -> bool:
    try:
        parse(data + b"\n")
    except (pa.ArrowException, TableError):
        return True
    return False


def _place(file: TableFile, position: int) -> str:
    """Return the number of the line at ``position``, or the position itself deep in a large file."""
    if position > _MOST_BYTES_TO_COUNT:
        return f"byte {position}"
    count, left = 1, position
    with open_text(file) as stream:
        while left and (data := stream.read(min(left, TEXT_BYTES))):
            count += data.count(b"\n")
            left -= len(data)
    return f"line {count}"
