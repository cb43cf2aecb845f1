"""What a broker answers to each kind of request, field by field."""

from __future__ import annotations

import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from luminosity.testing.transactional.coordinator import CommittedOffset, Coordinator, Partition
from luminosity.testing.transactional.log import Fetched, PartitionLog
from luminosity.testing.transactional.wire import Fields, array, batch_at, nullable_bytes, string

__all__ = ["KINDS", "Answers"]

KINDS = {
    "produce": 0,
    "fetch": 1,
    "list_offsets": 2,
    "metadata": 3,
    "offset_commit": 8,
    "offset_fetch": 9,
    "find_coordinator": 10,
    "api_versions": 18,
    "init_producer_id": 22,
    "add_partitions_to_txn": 24,
    "add_offsets_to_txn": 25,
    "end_txn": 26,
    "txn_offset_commit": 28,
}
"""The numbers of requests in Kafka's protocol."""

# The oldest and the newest version of each request: the last ones with fields of fixed size.
_VERSIONS = {0: (3, 7), 1: (4, 4), 2: (1, 2), 3: (1, 4), 8: (2, 2), 9: (1, 1), 10: (0, 2), 18: (0, 3)}
_OF_TRANSACTIONS = {22: (0, 1), 24: (0, 0), 25: (0, 0), 26: (0, 0), 28: (0, 0)}

_NODE = 1  # the number of the only broker
_EARLIEST, _LATEST = -2, -1  # in the place of a timestamp
_MOST_BYTES = 1 << 30  # of all partitions
_COMMITTED = 1  # the isolation level of readers that want committed records only

# Errors of the protocol.
_UNKNOWN_TOPIC_OR_PARTITION = 3
_UNSUPPORTED_VERSION = 35
_STORAGE_ERROR = 56


class Answers:
    """The broker without its sockets: any thread may call the methods. ``address`` is what clients connect to."""

    def __init__(self, address: tuple[str, int], longest_s: float, *, has_transactions: bool) -> None:
        self._address = address
        self._versions = {**_VERSIONS, **(_OF_TRANSACTIONS if has_transactions else {})}
        self._topics: dict[str, list[PartitionLog]] = {}
        self._changed = threading.Condition()
        self.coordinator = Coordinator(self._log, longest_s)
        self.failures: dict[int, deque[int]] = {}  # by kind of request, the errors of the next ones
        self.requests: Counter[int] = Counter()
        self.is_closed = False

    def create_topic(self, name: str, partitions: int) -> bool:
        """Create a topic; return whether there was none with this name."""
        with self._changed:
            if name in self._topics:
                return False
            self._topics[name] = [PartitionLog() for _ in range(partitions)]
            return True

    def count(self, topic: str) -> int:
        """Return how many committed records a topic has."""
        with self._changed:
            return sum(log.committed for log in self._topics.get(topic, []))

    def committed(self, group: str) -> dict[Partition, CommittedOffset]:
        """Return the offsets that a group has committed."""
        with self._changed:
            return dict(self.coordinator.groups.get(group, {}))

    def forget_group(self, group: str) -> None:
        """Forget the offsets of a group."""
        with self._changed:
            self.coordinator.groups.pop(group, None)

    def transactions(self) -> tuple[int, int]:
        """Return how many transactions were committed and aborted."""
        with self._changed:
            return self.coordinator.committed, self.coordinator.aborted

    def fail(self, kind: int, codes: Sequence[int]) -> None:
        """Answer the next requests of a kind with these errors."""
        with self._changed:
            self.failures.setdefault(kind, deque()).extend(codes)

    def abort_late(self) -> None:
        """Abort transactions that have been open for too long."""
        with self._changed:
            self.coordinator.abort_late(time.monotonic())
            self._changed.notify_all()

    def close(self) -> None:
        """Let requests that wait for records end."""
        with self._changed:
            self.is_closed = True
            self._topics.clear()
            self._changed.notify_all()

    def answer(self, kind: int, version: int, body: bytes) -> bytes | None:
        """Return the answer to a request without its header; None if it gets none."""
        fields = Fields(body)
        with self._changed:
            self.requests[kind] += 1
            oldest, newest = self._versions.get(kind, (0, -1))
            if kind == KINDS["api_versions"]:
                return self._api_versions(version if version <= newest else -1)
            if not oldest <= version <= newest:
                return None
            error = self.failures[kind].popleft() if self.failures.get(kind) else 0
            return self._METHODS[kind](self, fields, version, error)

    def _api_versions(self, version: int) -> bytes:
        rows = sorted(self._versions.items())
        if version < 3:
            listed = array(struct.pack(">hhh", kind, *versions) for kind, versions in rows)
            return struct.pack(">h", 0 if version >= 0 else _UNSUPPORTED_VERSION) + listed + bytes(4 * (version > 0))
        listed = b"".join(struct.pack(">hhhb", kind, *versions, 0) for kind, versions in rows)
        return struct.pack(">hB", 0, len(rows) + 1) + listed + bytes(5)

    def _metadata(self, fields: Fields, version: int, error: int) -> bytes:
        count = fields.number("i")
        names = sorted(self._topics) if count < 0 else [fields.text() for _ in range(count)]
        host, port = self._address
        broker = struct.pack(">i", _NODE) + string(host) + struct.pack(">i", port) + string(None)
        topics: list[bytes] = []
        for name in names:
            logs = self._topics.get(name, [])
            code = error or (0 if name in self._topics else _UNKNOWN_TOPIC_OR_PARTITION)
            replicas = array([struct.pack(">i", _NODE)])
            partitions = [struct.pack(">hii", 0, number, _NODE) + 2 * replicas for number in range(len(logs))]
            topics.append(struct.pack(">h", code) + string(name) + b"\0" + array(partitions))
        throttle = bytes(4 * (version >= 3))
        cluster = string("luminosity-testing") if version >= 2 else b""
        return throttle + array([broker]) + cluster + struct.pack(">i", _NODE) + array(topics)

    def _produce(self, fields: Fields, version: int, error: int) -> bytes | None:
        transactional_id = fields.string()
        acks = fields.number("h")
        fields.number("i")  # the time that replicas may take

        def write(partition: Partition) -> bytes:
            data = fields.nullable_bytes()
            code, offset = (error, -1) if error else self._write(transactional_id, partition, data)
            start = struct.pack(">q", 0) if version >= 5 else b""
            return struct.pack(">hqq", code, offset, -1) + start

        answer = _topics(fields, write) + bytes(4)
        self._changed.notify_all()
        return answer if acks else None

    def _write(self, transactional_id: str | None, partition: Partition, data: bytes) -> tuple[int, int]:
        log = self._log(partition)
        if log is None:
            return _UNKNOWN_TOPIC_OR_PARTITION, -1
        if sum(each.bytes for logs in self._topics.values() for each in logs) > _MOST_BYTES:
            return _STORAGE_ERROR, -1
        if transactional_id is not None:
            header = batch_at(data, 0)
            may = self.coordinator.may_write(transactional_id, header.producer, header.epoch, partition)
            if may:
                return may, -1
        return log.append(data)

    def _fetch(self, fields: Fields, version: int, error: int) -> bytes:
        del version
        _ = fields.number("i")  # the number of a broker that is a replica
        wait_ms, least, most = fields.number("i"), fields.number("i"), fields.number("i")
        is_committed = fields.number("b") == _COMMITTED
        asked: list[tuple[str, list[tuple[int, int, int]]]] = fields.array(
            lambda: (
                fields.text(),
                fields.array(lambda: (fields.number("i"), fields.number("q"), fields.number("i"))),
            )
        )
        deadline = time.monotonic() + wait_ms / 1000
        while True:
            found = {
                (topic, number): self._read((topic, number), start, min(most, part), is_committed)
                for topic, partitions in asked
                for number, start, part in partitions
            }
            is_enough = sum(len(each.data) for each in found.values()) >= least or any(e.error for e in found.values())
            left = deadline - time.monotonic()
            if is_enough or error or left <= 0 or self.is_closed:
                break
            self._changed.wait(left)
        topics = (
            string(topic) + array(_fetched(number, found[topic, number], error) for number, *_ in partitions)
            for topic, partitions in asked
        )
        return bytes(4) + array(topics)

    def _read(self, partition: Partition, start: int, most: int, is_committed: bool) -> Fetched:
        log = self._log(partition)
        if log is None:
            return Fetched(_UNKNOWN_TOPIC_OR_PARTITION, -1, -1, [], b"")
        return log.read(start, most, is_committed=is_committed)

    def _list_offsets(self, fields: Fields, version: int, error: int) -> bytes:
        fields.number("i")  # as above
        is_committed = version >= 2 and fields.number("b") == _COMMITTED

        def find(partition: Partition) -> bytes:
            time_ms, log = fields.number("q"), self._log(partition)
            if log is None:
                return struct.pack(">hqq", error or _UNKNOWN_TOPIC_OR_PARTITION, -1, -1)
            last = log.stable_end if is_committed else log.end
            return struct.pack(">hqq", error, -1, {_EARLIEST: 0, _LATEST: last}.get(time_ms, -1))

        answer = _topics(fields, find)
        return bytes(4 * (version >= 2)) + answer

    def _find_coordinator(self, fields: Fields, version: int, error: int) -> bytes:
        del fields
        host, port = self._address
        where = struct.pack(">i", _NODE) + string(host) + struct.pack(">i", port)
        return bytes(4 * (version >= 1)) + struct.pack(">h", error) + (string(None) if version >= 1 else b"") + where

    def _offset_fetch(self, fields: Fields, version: int, error: int) -> bytes:
        del version
        offsets = self.coordinator.groups.get(fields.text(), {})

        def find(partition: Partition) -> bytes:
            offset, metadata = offsets.get(partition, (-1, ""))
            return struct.pack(">q", offset) + string(metadata) + struct.pack(">h", error)

        return _topics(fields, find)

    def _offset_commit(self, fields: Fields, version: int, error: int) -> bytes:
        del version
        group = fields.text()
        _ = (
            fields.number("i"),
            fields.text(),
            fields.number("q"),
        )  # the member of the group, and for how long to keep them

        def commit(partition: Partition) -> bytes:
            offset, metadata = fields.number("q"), fields.text()
            if not error:
                self.coordinator.groups.setdefault(group, {})[partition] = CommittedOffset(offset, metadata)
            return struct.pack(">h", error)

        return _topics(fields, commit)

    def _init_producer_id(self, fields: Fields, version: int, error: int) -> bytes:
        del version
        transactional_id, timeout_ms = fields.string(), fields.number("i")
        found = (error, -1, -1)
        if not error:
            found = self.coordinator.begin_producer(transactional_id, timeout_ms / 1000)
            self._changed.notify_all()
        return bytes(4) + struct.pack(">hqh", *found)

    def _add_partitions(self, fields: Fields, version: int, error: int) -> bytes:
        del version
        owner = fields.text(), fields.number("q"), fields.number("h")

        def add(partition: Partition) -> bytes:
            code = error or (0 if self._log(partition) is not None else _UNKNOWN_TOPIC_OR_PARTITION)
            return struct.pack(">h", code or self.coordinator.add_partitions(*owner, [partition]))

        return bytes(4) + _topics(fields, add)

    def _add_offsets(self, fields: Fields, version: int, error: int) -> bytes:
        del version
        owner = fields.text(), fields.number("q"), fields.number("h")
        return bytes(4) + struct.pack(">h", error or self.coordinator.add_group(*owner, fields.text()))

    def _txn_offset_commit(self, fields: Fields, version: int, error: int) -> bytes:
        del version
        transactional_id, group, producer, epoch = fields.text(), fields.text(), fields.number("q"), fields.number("h")

        def add(partition: Partition) -> bytes:
            offsets = {partition: CommittedOffset(fields.number("q"), fields.text())}
            code = error or (0 if self._log(partition) is not None else _UNKNOWN_TOPIC_OR_PARTITION)
            add_offsets = self.coordinator.add_offsets
            return struct.pack(">h", code or add_offsets(transactional_id, producer, epoch, group, offsets))

        return bytes(4) + _topics(fields, add)

    def _end_txn(self, fields: Fields, version: int, error: int) -> bytes:
        del version
        owner = fields.text(), fields.number("q"), fields.number("h")
        is_commit = bool(fields.number("b"))
        code = error or self.coordinator.end(*owner, is_commit=is_commit)
        self._changed.notify_all()
        return bytes(4) + struct.pack(">h", code)

    def _log(self, partition: Partition) -> PartitionLog | None:
        logs = self._topics.get(partition[0], [])
        return logs[partition[1]] if 0 <= partition[1] < len(logs) else None

    _METHODS: Mapping[int, Callable[[Any, Fields, int, int], bytes | None]] = {
        0: _produce,
        1: _fetch,
        2: _list_offsets,
        3: _metadata,
        8: _offset_commit,
        9: _offset_fetch,
        10: _find_coordinator,
        22: _init_producer_id,
        24: _add_partitions,
        25: _add_offsets,
        26: _end_txn,
        28: _txn_offset_commit,
    }


def _topics(fields: Fields, each: Callable[[Partition], bytes]) -> bytes:
    """Return an answer for each partition of each topic of a request, as ``each`` makes it from the next fields."""

    def topic() -> bytes:
        name = fields.text()

        def partition() -> bytes:
            number = fields.number("i")
            return struct.pack(">i", number) + each((name, number))

        return string(name) + array(fields.array(partition))

    return array(fields.array(topic))


def _fetched(number: int, found: Fetched, error: int) -> bytes:
    aborted = array(struct.pack(">qq", each.producer, each.first) for each in found.aborted)
    head = struct.pack(">ihqq", number, error or found.error, found.end, found.stable_end)
    return head + aborted + nullable_bytes(b"" if error else found.data)
