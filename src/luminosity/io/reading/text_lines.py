"""Lines of text, in blocks: which of them belong to a range of bytes, and which one a parser chokes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from luminosity.errors import TableError
from luminosity.io.reading.byte_ranges import EVERYTHING
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.open_file import open_text
from luminosity.io.reading.reader import TEXT_BYTES, Claim, claim_whole

__all__ = ["BYTE_ORDER_MARK", "blocks", "explain", "head"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HEAD_BYTES = 1 << 20
_READ_AHEAD = 64 << 10  # beyond the range, in which the end of its last line is likely to be
_MOST_TO_COUNT = 1 << 30


def head(file: TableFile, size: int = _HEAD_BYTES) -> bytes:
    """The first whole lines of the file; of a file that is not longer, all."""
    data = b""
    with open_text(file) as stream:
        while more := stream.read(size):
            data += more
            if len(data) >= size and data.strip().find(b"\n") >= 0:
                return data[: data.rfind(b"\n") + 1]
    return data


def blocks(file: TableFile, first: int, start: int, stop: int, claim: Claim) -> Iterator[tuple[int, bytes]]:
    """Whole lines that begin in the range, each block with its position; the first line of all is at `first`.

    A compressed file is read whole by who has its first byte: nobody can begin in its middle.
    """
    if file.compression is None:
        with open_text(file) as stream:
            yield from _blocks(stream, _seek(stream, first, start), stop, claim)
    elif claim_whole(start, claim):
        with open_text(file) as stream:
            stream.read(first)
            yield from _blocks(stream, first, EVERYTHING, lambda position: position)


def _seek(stream: pa.NativeFile, first: int, start: int) -> int:
    """Go to the first line that begins at `start` or behind it."""
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


def _blocks(stream: pa.NativeFile, position: int, stop: int, claim: Claim) -> Iterator[tuple[int, bytes]]:
    begun = b""
    while True:
        read = stream.read(min(TEXT_BYTES, max(stop - position - len(begun), 0) + _READ_AHEAD))
        data = begun + read
        end = data.rfind(b"\n", len(begun)) + 1 if read else len(data)
        if not data:
            return
        if not end:
            begun = data  # a line that is longer than a block
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
    file: TableFile, position: int, data: bytes, parse: Callable[[bytes], Any], error: Exception, advice: str
) -> TableError:
    """An error that shows the line at fault, found by halving."""
    lines = data.split(b"\n")
    while len(lines) > 1:
        middle = len(lines) // 2
        if _fails(parse, b"\n".join(lines[:middle])):
            lines = lines[:middle]
        elif _fails(parse, b"\n".join(lines[middle:])):
            position += sum(map(len, lines[:middle])) + middle
            lines = lines[middle:]
        else:
            return TableError(f"{file.path}, from {_place(file, position)} on: {error}; {advice}")
    try:
        parse(lines[0] + b"\n")
    except (pa.ArrowException, TableError) as its_own:
        error = its_own
    shown = lines[0][:120].decode(errors="replace").strip()
    return TableError(f"{file.path}, {_place(file, position)}: {error}; the line begins with {shown!r}; {advice}")


def _fails(parse: Callable[[bytes], Any], data: bytes) -> bool:
    try:
        parse(data + b"\n")
    except (pa.ArrowException, TableError):
        return True
    return False


def _place(file: TableFile, position: int) -> str:
    """The number of a line; deep in a large file its byte, since lines would have to be counted."""
    if position > _MOST_TO_COUNT:
        return f"byte {position}"
    count, left = 1, position
    with open_text(file) as stream:
        while left and (data := stream.read(min(left, TEXT_BYTES))):
            count += data.count(b"\n")
            left -= len(data)
    return f"line {count}"
