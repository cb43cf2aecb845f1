"""The records of a partition as a broker keeps them: batches, sequence numbers of producers, transactions."""

from __future__ import annotations

import bisect
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from luminosity.testing.transactional.wire import BatchHeader, batch_at, marker

__all__ = ["Aborted", "Fetched", "PartitionLog"]

_REMEMBERED = 5  # batches of a producer that are recognized if they come again: as many may be on their way at once

# Errors of the protocol.
_OFFSET_OUT_OF_RANGE = 1
_CORRUPT_MESSAGE = 2
_OUT_OF_ORDER_SEQUENCE = 45
_INVALID_PRODUCER_EPOCH = 47


class Aborted(NamedTuple):
    """A transaction that was aborted."""

    producer: int
    first: int
    """The offset of its first record."""
    last: int
    """The offset of its marker."""


class Fetched(NamedTuple):
    """The answer to a fetch from one partition."""

    error: int
    end: int
    stable_end: int
    """The offset from which on transactions are open."""
    aborted: list[Aborted]
    data: bytes


@dataclass
class _Producer:
    epoch: int
    next: int = 0  # sequence number
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # sequence and offset


class PartitionLog:
    """The batches of a partition. The caller lets one thread in at a time, and bounds the bytes."""

    def __init__(self) -> None:
        self.end = 0
        self.bytes = 0
        self.committed = 0
        """Records without a transaction, and those of committed ones."""
        self._starts: list[int] = []  # of the batches
        self._batches: list[bytes] = []
        self._producers: dict[int, _Producer] = {}
        self._open: dict[int, int] = {}  # by producer, the first offset of its transaction
        self._uncommitted: dict[int, int] = {}  # by producer, the records of its transaction
        self._aborted: list[Aborted] = []

    @property
    def stable_end(self) -> int:
        """The offset before which every transaction has ended."""
        return min(self._open.values(), default=self.end)

    def append(self, data: bytes) -> tuple[int, int]:
        """Add batches of records. Returns an error, and the offset of the first record."""
        try:
            found = list(_headers(data))
        except ValueError:
            return _CORRUPT_MESSAGE, -1
        first = -1
        for at, header in found:
            error, offset = self._append(data[at : at + header.size], header)
            if error:
                return error, -1
            first = offset if first < 0 else first
        return 0, first

    def _append(self, batch: bytes, header: BatchHeader) -> tuple[int, int]:
        if header.producer >= 0:
            known = self._producers.get(header.producer)
            if known is None or header.epoch > known.epoch:
                known = self._producers[header.producer] = _Producer(header.epoch)
            if header.epoch < known.epoch:
                return _INVALID_PRODUCER_EPOCH, -1
            if header.sequence != known.next:
                again = [offset for sequence, offset in known.recent if sequence == header.sequence]
                return (0, again[0]) if again else (_OUT_OF_ORDER_SEQUENCE, -1)
            known.next = header.sequence + header.records
            known.recent.append((header.sequence, self.end))
            if header.is_transactional:
                self._open.setdefault(header.producer, self.end)
                self._uncommitted[header.producer] = self._uncommitted.get(header.producer, 0) + header.records
        if not header.is_transactional:
            self.committed += header.records
        return 0, self._add(batch, header.records)

    def _add(self, batch: bytes, records: int) -> int:
        offset = self.end
        self._starts.append(offset)
        self._batches.append(struct.pack(">q", offset) + batch[8:])  # The checksum does not cover the offset.
        self.end += records
        self.bytes += len(batch)
        return offset

    def end_transaction(self, producer: int, epoch: int, *, is_commit: bool, timestamp: int) -> None:
        """Write the marker of a transaction."""
        known = self._producers.get(producer)
        if known is None or epoch > known.epoch:
            self._producers[producer] = _Producer(epoch)
        end = self._add(marker(producer, epoch, offset=self.end, is_commit=is_commit, timestamp=timestamp), 1)
        self.committed += self._uncommitted.pop(producer, 0) if is_commit else 0
        self._uncommitted.pop(producer, None)
        first = self._open.pop(producer, None)
        if first is not None and not is_commit:
            self._aborted.append(Aborted(producer, first, end))

    def read(self, start: int, most: int, *, is_committed: bool) -> Fetched:
        """Return batches from that offset on, about ``most`` bytes. ``is_committed``: none of open transactions."""
        stable = self.stable_end
        if not 0 <= start <= self.end:
            return Fetched(_OFFSET_OUT_OF_RANGE, self.end, stable, [], b"")
        limit = stable if is_committed else self.end
        taken: list[bytes] = []
        size, at = 0, max(0, bisect.bisect_right(self._starts, start) - 1)
        while at < len(self._starts) and self._starts[at] < limit and (not taken or size < most):
            taken.append(self._batches[at])
            size += len(self._batches[at])
            at += 1
        end = self._starts[at] if at < len(self._starts) else self.end
        aborted = [each for each in self._aborted if each.last >= start and each.first < end] if is_committed else []
        return Fetched(0, self.end, stable, aborted, b"".join(taken))


def _headers(data: bytes) -> Iterator[tuple[int, BatchHeader]]:
    at = 0
    while at < len(data):
        header = batch_at(data, at)
        yield at, header
        at += header.size
