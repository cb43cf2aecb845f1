"""The consumer of a script: what it asks for, in any process, and how the script answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection
from types import SimpleNamespace
from typing import Any

from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.io.kafka.client import KafkaClient
from luminosity.testing.scripted_log import Entry, ScriptedPartition, Transactions

__all__ = ["ScriptedClient", "ScriptedConsumer", "ScriptedReads"]

_STEP_S = 0.005  # how late a poll notices a record
_END, _BEGINNING, _UNSET = -1, -2, -1001  # the numbers of Kafka and librdkafka in the place of offsets

_Partition = tuple[str, int]
_Found = tuple[str, int, int, Entry | None, int]  # topic, partition, offset, the record or the code of an error


class ScriptedClient(KafkaClient):
    """Connects consumers to a script. It travels with the pipeline."""

    def __init__(self, address: Any, key: bytes) -> None:
        super().__init__("scripted:9092")
        self._address = address
        self._key = key

    def connect(self) -> Connection:
        """Open a connection, which the caller closes."""
        return Client(self._address, authkey=self._key)

    def consumer(self, settings: Mapping[str, Any], on_error: Callable[[Any], None]) -> Any:
        """Make a consumer, which the caller closes."""
        return ScriptedConsumer(self.connect(), settings, on_error)

    def producer(self, settings: Mapping[str, Any], on_error: Callable[[Any], None]) -> Any:
        """Raise: a script is only read."""
        raise InvalidArgument(
            "found a ScriptedKafka in the place of a producer's brokers, expected addresses",
            fix="write to luminosity.testing.KafkaBroker",
        )


class ScriptedConsumer:
    """Stands for ``confluent_kafka.Consumer``, as far as ``ReadKafka`` uses it. Any thread may call it."""

    def __init__(self, connection: Connection, settings: Mapping[str, Any], on_error: Callable[[Any], None]) -> None:
        self._kafka = require("confluent_kafka", extra="kafka")
        self._connection = connection
        self._lock = threading.Lock()
        self._on_error = on_error
        connection.send({name: settings[name] for name in ("group.id", "isolation.level") if name in settings})

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Return topics with their partitions, as far as ``ReadKafka`` looks at them."""
        del timeout
        found: dict[str, list[int]] = self._ask("list_topics", topic)
        return SimpleNamespace(
            topics={
                name: SimpleNamespace(
                    partitions=dict.fromkeys(numbers),
                    error=None if numbers else self._error(self._kafka.KafkaError.UNKNOWN_TOPIC_OR_PART),
                )
                for name, numbers in found.items()
            }
        )

    def offsets_for_times(self, partitions: list[Any], timeout: float = -1) -> list[Any]:
        """Return partitions with the offsets of times, or with an error."""
        del timeout
        found = self._ask("offsets", [(p.topic, p.partition, p.offset) for p in partitions])
        if found and all(code for _, _, _, code in found):
            raise self._kafka.KafkaException(self._error(found[0][3]))
        return self._listed(found)

    def committed(self, partitions: list[Any], timeout: float = -1) -> list[Any]:
        """Return partitions with the offsets that the group has committed."""
        del timeout
        return self._listed(self._ask("committed", [(p.topic, p.partition) for p in partitions]))

    def commit(self, message: Any = None, offsets: Any = None, asynchronous: bool = True) -> None:
        """Commit offsets for the group."""
        del message, asynchronous
        self._ask("commit", {(each.topic, each.partition): each.offset for each in offsets})

    def assign(self, partitions: list[Any]) -> None:
        """Read these partitions, from their offsets on."""
        self._ask("assign", {(p.topic, p.partition): p.offset for p in partitions})

    def poll(self, timeout: float = -1) -> Any:
        """Return a message, or None if there is none in time."""
        found = self.consume(1, timeout)
        return found[0] if found else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Any]:
        """Return the messages that are there. Waits for the first one."""
        deadline = float("inf") if timeout < 0 else time.monotonic() + timeout
        while True:
            found = self._poll(num_messages)
            left = deadline - time.monotonic()
            if found or left <= 0:
                return [self._message(*each) for each in found]
            time.sleep(min(_STEP_S, left))

    def get_watermark_offsets(self, partition: Any, timeout: float = -1, cached: bool = False) -> Any:
        """Return the first offset and the offset after the last; those of the last poll if ``cached``."""
        del timeout
        return self._ask("seen" if cached else "watermarks", partition.topic, partition.partition)

    def close(self) -> None:
        """Close the connection. A call in another thread ends first."""
        with self._lock:
            self._connection.close()

    def _poll(self, most: int) -> list[_Found]:
        is_answered, found = self._exchange("poll", most)
        if is_answered:
            return found
        if found is not None:
            self._on_error(self._error(found))
        return []

    def _ask(self, name: str, *arguments: Any) -> Any:
        is_answered, found = self._exchange(name, *arguments)
        if not is_answered:
            raise self._kafka.KafkaException(self._error(self._kafka.KafkaError._TRANSPORT))
        return found

    def _exchange(self, *request: Any) -> tuple[bool, Any]:
        try:
            with self._lock:
                self._connection.send(request)
                return self._connection.recv()
        except (EOFError, OSError):
            return False, None  # The script has ended, as a broker that has stopped.

    def _listed(self, found: list[tuple[str, int, int, int]]) -> list[Any]:
        answers: list[Any] = []
        for topic, number, offset, code in found:
            answer = self._kafka.TopicPartition(topic, number, offset)
            error = self._error(code) if code else None
            answers.append(
                SimpleNamespace(topic=topic, partition=number, offset=offset, error=error) if error else answer
            )
        return answers

    def _message(self, topic: str, number: int, offset: int, entry: Entry | None, code: int) -> Any:
        make = self._kafka.Message
        if entry is None:
            return make(topic=topic, partition=number, offset=offset, error=self._error(code))
        return make(
            topic=topic,
            partition=number,
            offset=offset,
            key=entry.key,
            value=entry.value,
            headers=list(entry.headers) or None,
            timestamp=(entry.timestamp_type, entry.timestamp),
        )

    def _error(self, code: int) -> Any:
        return self._kafka.KafkaError(code)


class ScriptedReads:
    """Answers one consumer: it knows where the consumer stands in each partition. The script calls it with its lock."""

    def __init__(
        self,
        partitions: Callable[[], Mapping[_Partition, ScriptedPartition]],
        transactions: Transactions,
        committed: dict[_Partition, int],
        is_committed: bool,
    ) -> None:
        self._kafka = require("confluent_kafka", extra="kafka").KafkaError
        self._partitions = partitions
        self._transactions = transactions
        self._committed = committed
        self._is_committed = is_committed
        self._at: dict[_Partition, int] = {}
        self._seen: dict[_Partition, tuple[int, int]] = {}
        self._told: dict[_Partition, tuple[int, int]] = {}  # the error that the consumer knows of: its code and offset

    def list_topics(self, topic: str | None) -> dict[str, list[int]]:
        """Return the numbers of the partitions by topic; a topic that is asked for may have none."""
        found: dict[str, list[int]] = {} if topic is None else {topic: []}
        for name, number in self._partitions():
            if topic in (None, name):
                found.setdefault(name, []).append(number)
        return found

    def offsets(self, wanted: list[tuple[str, int, int]]) -> list[tuple[str, int, int, int]]:
        """Return the offset of a time in each partition, or an error."""
        return [(topic, number, *self._offset(topic, number, when)) for topic, number, when in wanted]

    def _offset(self, topic: str, number: int, when: int) -> tuple[int, int]:
        log = self._partitions().get((topic, number))
        if log is None:
            return _UNSET, self._kafka._UNKNOWN_PARTITION
        if when == _END:
            return self._limit(log), 0
        return (log.first if when == _BEGINNING else log.offset_of(when)), 0

    def committed(self, wanted: list[_Partition]) -> list[tuple[str, int, int, int]]:
        """Return the offsets that the group has committed."""
        return [(*partition, self._committed.get(partition, _UNSET), 0) for partition in wanted]

    def commit(self, offsets: dict[_Partition, int]) -> None:
        """Note the offsets that the group commits."""
        self._committed.update(offsets)

    def assign(self, positions: dict[_Partition, int]) -> None:
        """Read these partitions next, from these offsets on."""
        self._at = dict(positions)
        self._told = {}

    def watermarks(self, topic: str, number: int) -> tuple[int, int]:
        """Return the first offset and the end as a consumer sees them, or -1001 if there is no such partition."""
        log = self._partitions().get((topic, number))
        return (_UNSET, _UNSET) if log is None else (log.first, self._limit(log))

    def seen(self, topic: str, number: int) -> tuple[int, int]:
        """Return the first offset and the end as the last poll has found them, with the records of all transactions."""
        return self._seen.get((topic, number), (_UNSET, _UNSET))

    def poll(self, most: int) -> list[_Found]:
        """Return records and errors, partition by partition."""
        found: list[_Found] = []
        for partition in self._at:
            if (log := self._partitions().get(partition)) is not None:
                self._seen[partition] = log.first, log.end
            if len(found) < most:
                found += self._poll(partition, most - len(found))
        return found

    def _poll(self, partition: _Partition, most: int) -> list[_Found]:
        at, log = self._at[partition], self._partitions().get(partition)
        if log is None:
            return self._tell_once(partition, self._kafka.UNKNOWN_TOPIC_OR_PART, at)
        if not log.first <= at <= log.end:
            return self._tell_once(partition, self._kafka._AUTO_OFFSET_RESET, at)
        entries = log.read(at, most, self._transactions, committed=self._is_committed)
        fails_at, limit = log.fails_at, self._limit(log)
        if fails_at is not None and fails_at <= limit:
            entries = [entry for entry in entries if entry.offset < fails_at]
            if not entries:
                return [(*partition, at, None, log.take_failure())]
        found: list[_Found] = [(*partition, entry.offset, entry, 0) for entry in entries]
        if entries:
            self._at[partition] = entries[-1].offset + 1
        if len(entries) < most and (fails_at is None or fails_at > limit):
            found += self._tell_once(partition, self._kafka._PARTITION_EOF, limit)
        return found

    def _tell_once(self, partition: _Partition, code: int, offset: int) -> list[_Found]:
        if self._told.get(partition) == (code, offset):
            return []
        self._told[partition] = code, offset
        return [(*partition, offset, None, code)]

    def _limit(self, log: ScriptedPartition) -> int:
        return log.limit(self._transactions, committed=self._is_committed)
