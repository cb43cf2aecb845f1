"""Kafka's protocol: the fields of requests and answers, and batches of records as far as a broker looks at them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

__all__ = ["BatchHeader", "Fields", "array", "batch_at", "marker", "nullable_bytes", "string"]

# The first bytes of a batch of records, version 2: the offset of the first, the length of the rest, the leader's epoch,
# the format, a checksum, attributes, the offset of the last from the first, two timestamps, the producer's id, its
# epoch, the sequence number of the first, and the number of records.
_BATCH = struct.Struct(">qiibIhiqqqhii")
_LENGTH_AT = 12  # where the bytes begin that the batch's length counts
_CHECKED_AT = 21  # where the bytes begin that the checksum covers
_FORMAT = 2
_TRANSACTIONAL, _CONTROL = 0x10, 0x20  # attributes
_CASTAGNOLI = 0x82F63B78  # the polynomial of the checksum, reversed


class BatchHeader(NamedTuple):
    """What a broker reads of a batch of records."""

    size: int
    """Bytes of the whole batch."""
    records: int
    """Offsets that it takes."""
    is_transactional: bool
    producer: int
    """The id of the producer, or -1."""
    epoch: int
    sequence: int
    """The sequence number of the first record, or -1."""


class Fields:
    """Reads the fields of a request, one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, kind: str) -> int:
        """Return a number: ``"b"``, ``"h"``, ``"i"`` or ``"q"`` for 8 to 64 bits."""
        found = struct.unpack_from(f">{kind}", self._data, self._at)[0]
        self._at += struct.calcsize(kind)
        return found

    def string(self) -> str | None:
        """Return a text, or None."""
        size = self.number("h")
        return None if size < 0 else self._take(size).decode()

    def text(self) -> str:
        """Return a text; None is empty."""
        return self.string() or ""

    def nullable_bytes(self) -> bytes:
        """Return bytes; None is empty."""
        return self._take(max(0, self.number("i")))

    def array(self, read: Callable[[], Any]) -> list[Any]:
        """Return the items of a list, each read by a function; None is empty."""
        return [read() for _ in range(max(0, self.number("i")))]

    def _take(self, size: int) -> bytes:
        self._at += size
        if self._at > len(self._data):
            raise ValueError(f"found a request of {len(self._data)} bytes, expected {self._at}")
        return self._data[self._at - size : self._at]


def string(text: str | None) -> bytes:
    """Return a text, or None, as in an answer."""
    if text is None:
        return struct.pack(">h", -1)
    encoded = text.encode()
    return struct.pack(">h", len(encoded)) + encoded


def nullable_bytes(data: bytes) -> bytes:
    """Return bytes as in an answer."""
    return struct.pack(">i", len(data)) + data


def array(items: Iterable[bytes]) -> bytes:
    """Return a list of encoded items as in an answer."""
    encoded = [*items]
    return struct.pack(">i", len(encoded)) + b"".join(encoded)


def batch_at(data: bytes, start: int) -> BatchHeader:
    """Return the header of the batch that begins there. Raises ``ValueError`` if there is no whole batch.

    >>> batch_at(marker(7, 0, offset=3, is_commit=True, timestamp=1_000), 0)
    BatchHeader(size=78, records=1, is_transactional=True, producer=7, epoch=0, sequence=-1)
    """
    if len(data) < start + _BATCH.size:
        raise ValueError(f"found {len(data) - start} bytes, expected a batch of records")
    _, length, _, version, _, attributes, last, _, _, producer, epoch, sequence, _ = _BATCH.unpack_from(data, start)
    size = _LENGTH_AT + length
    if version != _FORMAT or size < _BATCH.size or len(data) < start + size:
        raise ValueError(
            f"found a batch of format {version} and {size} bytes, expected a whole one of format {_FORMAT}"
        )
    return BatchHeader(size, last + 1, bool(attributes & _TRANSACTIONAL), producer, epoch, sequence)


def marker(producer: int, epoch: int, *, offset: int, is_commit: bool, timestamp: int) -> bytes:
    """Return the batch that ends a transaction in a partition."""
    key, value = struct.pack(">hh", 0, int(is_commit)), struct.pack(">hi", 0, 0)
    # Each number below is small, so it is one byte as a signed number of variable length: twice itself.
    record = b"\0\0\0" + bytes([2 * len(key)]) + key + bytes([2 * len(value)]) + value + b"\0"
    records = bytes([2 * len(record)]) + record
    length = _BATCH.size - _LENGTH_AT + len(records)
    attributes = _TRANSACTIONAL | _CONTROL
    numbers = attributes, 0, timestamp, timestamp, producer, epoch, -1, 1
    unchecked = _BATCH.pack(offset, length, 0, _FORMAT, 0, *numbers) + records
    return _BATCH.pack(offset, length, 0, _FORMAT, _crc32c(unchecked[_CHECKED_AT:]), *numbers) + records


@cache
def _table() -> list[int]:
    rows: list[int] = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_CASTAGNOLI if byte & 1 else 0)
        rows.append(byte)
    return rows


def _crc32c(data: bytes) -> int:
    table, found = _table(), 0xFFFFFFFF
    for byte in data:
        found = table[(found ^ byte) & 0xFF] ^ found >> 8
    return found ^ 0xFFFFFFFF
