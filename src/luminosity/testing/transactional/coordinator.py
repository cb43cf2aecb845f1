"""Transactions and committed offsets of a broker: who may write under an id, and what an end of a transaction does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from luminosity.testing.transactional.log import PartitionLog

__all__ = ["CommittedOffset", "Coordinator", "Partition"]

Partition = tuple[str, int]

_MOST_EPOCH = 32_000  # of 16 bits; then a producer gets a new number

# Errors of the protocol.
_INVALID_PRODUCER_EPOCH = 47
_INVALID_TXN_STATE = 48
_INVALID_PRODUCER_ID_MAPPING = 49
_INVALID_TRANSACTION_TIMEOUT = 50


class CommittedOffset(NamedTuple):
    """What a consumer group has committed for a partition."""

    offset: int
    metadata: str


@dataclass
class _Transaction:
    """The producer with a transactional id, and its transaction."""

    producer: int
    epoch: int = 0
    timeout_s: float = 60.0
    began_at: float = 0.0
    is_open: bool = False
    partitions: set[Partition] = field(default_factory=set[Partition])
    offsets: dict[str, dict[Partition, CommittedOffset]] = field(
        default_factory=dict[str, dict[Partition, CommittedOffset]]
    )
    ended: bool | None = None  # how the last one has ended: an end may be asked for again


class Coordinator:
    """All transactional ids and groups. The caller lets one thread in at a time. Methods return errors of the protocol.

    ``longest_s`` is the longest timeout that a transaction may have.
    """

    def __init__(self, logs: Callable[[Partition], PartitionLog | None], longest_s: float) -> None:
        self._logs = logs
        self._longest_s = longest_s
        self._next_producer = 1_000
        self._by_id: dict[str, _Transaction] = {}
        self.groups: dict[str, dict[Partition, CommittedOffset]] = {}
        self.committed = self.aborted = 0

    def begin_producer(self, transactional_id: str | None, timeout_s: float) -> tuple[int, int, int]:
        """Return an error, the number of a producer and its epoch. Fences the last one with the same id."""
        if transactional_id is None:
            self._next_producer += 1
            return 0, self._next_producer, 0
        if not 0 < timeout_s <= self._longest_s:
            return _INVALID_TRANSACTION_TIMEOUT, -1, -1
        found = self._by_id.get(transactional_id)
        if found is None or found.epoch >= _MOST_EPOCH:
            self._next_producer += 1
            found = self._by_id[transactional_id] = _Transaction(self._next_producer)
        else:
            found.epoch += 1
            if found.is_open:
                self._end(found, is_commit=False)
        found.timeout_s, found.ended = timeout_s, None
        return 0, found.producer, found.epoch

    def add_partitions(self, transactional_id: str, producer: int, epoch: int, partitions: Iterable[Partition]) -> int:
        """Note that a transaction will write to these partitions."""
        found, error = self._find(transactional_id, producer, epoch)
        if found is None:
            return error
        self._open(found)
        found.partitions.update(partitions)
        return 0

    def add_group(self, transactional_id: str, producer: int, epoch: int, group: str) -> int:
        """Note that a transaction will commit offsets of this group."""
        found, error = self._find(transactional_id, producer, epoch)
        if found is None:
            return error
        self._open(found)
        found.offsets.setdefault(group, {})
        return 0

    def add_offsets(
        self, transactional_id: str, producer: int, epoch: int, group: str, offsets: dict[Partition, CommittedOffset]
    ) -> int:
        """Keep offsets that the group gets if the transaction is committed."""
        found, error = self._find(transactional_id, producer, epoch)
        if found is None:
            return error
        if not found.is_open or group not in found.offsets:
            return _INVALID_TXN_STATE
        found.offsets[group].update(offsets)
        return 0

    def end(self, transactional_id: str, producer: int, epoch: int, *, is_commit: bool) -> int:
        """Commit or abort a transaction."""
        found, error = self._find(transactional_id, producer, epoch)
        if found is None:
            return error
        if found.is_open:
            self._end(found, is_commit=is_commit)
        elif found.ended is not is_commit:
            return _INVALID_TXN_STATE
        return 0

    def may_write(self, transactional_id: str, producer: int, epoch: int, partition: Partition) -> int:
        """Return an error unless the partition is part of an open transaction of this producer."""
        found, error = self._find(transactional_id, producer, epoch)
        if found is None:
            return error
        return 0 if found.is_open and partition in found.partitions else _INVALID_TXN_STATE

    def abort_late(self, now: float) -> None:
        """Abort transactions that were open for longer than their timeout, and fence their producers."""
        for found in self._by_id.values():
            if found.is_open and now - found.began_at > found.timeout_s:
                found.epoch += 1
                self._end(found, is_commit=False)

    def _find(self, transactional_id: str, producer: int, epoch: int) -> tuple[_Transaction | None, int]:
        found = self._by_id.get(transactional_id)
        if found is None or found.producer != producer:
            return None, _INVALID_PRODUCER_ID_MAPPING
        return (found, 0) if found.epoch == epoch else (None, _INVALID_PRODUCER_EPOCH)

    def _open(self, found: _Transaction) -> None:
        if not found.is_open:
            found.is_open, found.began_at = True, time.monotonic()

    def _end(self, found: _Transaction, *, is_commit: bool) -> None:
        now = time.time_ns() // 1_000_000
        for partition in sorted(found.partitions):
            log = self._logs(partition)
            if log is not None:
                log.end_transaction(found.producer, found.epoch, is_commit=is_commit, timestamp=now)
        if is_commit:
            self.committed += 1
            for group, offsets in found.offsets.items():
                self.groups.setdefault(group, {}).update(offsets)
        else:
            self.aborted += 1
        found.partitions.clear()
        found.offsets.clear()
        found.is_open, found.ended = False, is_commit
