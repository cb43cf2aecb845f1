"""A Kafka that follows a test's script: gaps in offsets, transactions, offsets by time, retention and errors."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from typing import Any

from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.io.kafka.client import KafkaClient
from luminosity.testing.kafka_in_tests import KafkaInTests, check_partitions, error_code, error_codes
from luminosity.testing.scripted_consumer import ScriptedClient, ScriptedReads
from luminosity.testing.scripted_log import Entry, ScriptedPartition, Transactions

__all__ = ["ScriptedKafka"]

_CREATE_TIME, _NO_TIMESTAMP = 1, 0  # the numbers of librdkafka


class ScriptedKafka(KafkaInTests):
    """A Kafka for tests of ``ReadKafka`` that does what ``KafkaBroker`` can't: your test writes its partitions down.

    Pass ``client`` to ``ReadKafka`` in the place of the addresses. Workers in other processes read the same script, and
    see what the test changes while they run. Leave the ``with`` block, and it is gone.

    >>> import apache_beam as beam
    >>> from luminosity import ReadKafka
    >>> with ScriptedKafka({"payments": 1}) as kafka:
    ...     kafka.produce("payments", "10 EUR", key="ann", timestamp=1_700_000_000_000)
    ...     kafka.skip_offsets("payments", 0, 3)  # compaction has removed them
    ...     kafka.produce("payments", "20 EUR", key="bob", transaction="first")
    ...     kafka.end_transaction("first", commit=False)
    ...     kafka.produce("payments", "30 EUR", key="cid", transaction="second")
    ...     kafka.end_transaction("second")
    ...     with beam.Pipeline("FnApiRunner") as pipeline:
    ...         records = pipeline | ReadKafka(kafka.client, "payments", stop="now", value="utf8")
    ...         _ = records | beam.Map(lambda record: print(record.offset, record.value))
    0 10 EUR
    6 30 EUR

    It has no real connections and no producer: use ``KafkaBroker`` for what a network does, and for ``WriteKafka``.

    Args:
        topics: the topics to create, with the number of their partitions.
    """

    _sent_instead = ("client", "kafka.client")

    def __init__(self, topics: Mapping[str, int] | None = None) -> None:
        require("confluent_kafka", extra="kafka")
        self._lock = threading.Lock()
        self._partitions: dict[tuple[str, int], ScriptedPartition] = {}
        self._transactions = Transactions()
        self._committed: dict[str, dict[tuple[str, int], int]] = {}
        self._requests: Counter[str] = Counter()
        self._consumers = 0
        self._is_away = False
        self._refusal: int | None = None
        for name, partitions in (topics or {}).items():
            self.create_topic(name, partitions)
        key = os.urandom(32)
        self._listener = Listener(family="AF_UNIX", backlog=64, authkey=key)
        self._client = ScriptedClient(self._listener.address, key)
        self._is_closed = False
        threading.Thread(target=self._accept, name="scripted-kafka", daemon=True).start()

    @property
    def client(self) -> KafkaClient:
        """The client for ``ReadKafka``, which takes it in the place of addresses."""
        return self._client

    def close(self) -> None:
        """End the script: its consumers get no more answers. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._client.connect().close()  # wakes the thread that accepts
            self._listener.close()

    # What the test writes down

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Create a topic, or add partitions to one that has fewer."""
        check_partitions(partitions)
        with self._lock:
            for number in range(partitions):
                self._partitions.setdefault((name, number), ScriptedPartition())

    def delete_topic(self, name: str) -> None:
        """Delete a topic. Consumers that read it get the error ``UNKNOWN_TOPIC_OR_PART``."""
        with self._lock:
            self._partition(name, 0)
            self._partitions = {key: found for key, found in self._partitions.items() if key[0] != name}

    def produce(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Sequence[tuple[str, bytes | str | None]] = (),
        timestamp: int | None = None,
        timestamp_type: int | None = None,
        partition: int = 0,
        offset: int | None = None,
        transaction: str | None = None,
    ) -> None:
        """Add a record to a partition.

        Args:
            topic: the topic.
            value: the value; None makes a tombstone.
            key: the key. It does not choose the partition.
            headers: names and values, in order; names may repeat.
            timestamp: milliseconds since 1970, by default now. 0 is a time; -1 means that the record has none.
            timestamp_type: 1 if the producer has set the time, the default; 2 if the broker has.
            partition: the partition.
            offset: the offset, by default the next. A larger one leaves a gap, as compaction does.
            transaction: the name of the transaction that the record belongs to. It begins with its first record.
        """
        given = time.time_ns() // 1_000_000 if timestamp is None else timestamp
        kind = (_NO_TIMESTAMP if given == -1 else _CREATE_TIME) if timestamp_type is None else timestamp_type
        pairs = tuple((name, _bytes(content)) for name, content in headers)
        with self._lock:
            log = self._partition(topic, partition)
            at = log.end if offset is None else offset
            number = None if transaction is None else self._transactions.number(transaction)
            log.append(Entry(at, kind, given, _bytes(key), _bytes(value), pairs, number))

    def produce_many(
        self, topic: str, records: Iterable[bytes | str | tuple[Any, Any] | Mapping[str, Any] | None]
    ) -> None:
        """Add records: each is a value, a tuple of key and value, or a dict with the arguments of ``produce``."""
        for record in records:
            if isinstance(record, Mapping):
                self.produce(topic, **record)
            elif isinstance(record, tuple):
                self.produce(topic, record[1], key=record[0])
            else:
                self.produce(topic, record)

    def skip_offsets(self, topic: str, partition: int, count: int = 1) -> None:
        """Leave out offsets at the end of a partition, as compaction and the markers of transactions do."""
        with self._lock:
            self._partition(topic, partition).end += count

    def end_transaction(self, name: str, *, commit: bool = True) -> None:
        """Commit a transaction, or abort it. Each partition that it has written to gets a marker, at an offset."""
        with self._lock:
            number = self._transactions.end(name, commit=commit)
            for log in self._partitions.values():
                if log.has(number):
                    log.end += 1

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Let a partition begin at offset ``before``, as Kafka does when records reach the topic's retention time."""
        with self._lock:
            log = self._partition(topic, partition)
            log.first = max(log.first, before)
            log.end = max(log.end, log.first)

    def fail_reads(self, topic: str, partition: int, *errors: str | int, at: int = 0) -> None:
        """Let reads of a partition from offset ``at`` on meet errors, one each, before they go on.

        Args:
            topic: the topic.
            partition: the partition.
            errors: names of errors of ``confluent_kafka.KafkaError``, or their numbers.
            at: the offset that a consumer must have reached.
        """
        codes = error_codes(errors)
        with self._lock:
            self._partition(topic, partition).fail(at, codes)

    def stop_broker(self) -> None:
        """Answer no request until ``start_broker``. Records that a consumer has already are not taken back."""
        with self._lock:
            self._is_away = True

    def refuse_clients(self, error: str | int = "_AUTHENTICATION") -> None:
        """Answer no request until ``start_broker``, and let clients know by an error that they are refused."""
        with self._lock:
            self._is_away, self._refusal = True, error_code(error)

    def start_broker(self) -> None:
        """Answer requests again."""
        with self._lock:
            self._is_away, self._refusal = False, None

    def commit(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Commit offsets for a group, by topic and partition."""
        with self._lock:
            self._committed.setdefault(group, {}).update(offsets)

    # What the test asks for

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        """Return the offsets that a group has committed, by topic and partition."""
        with self._lock:
            return dict(self._committed.get(group, {}))

    @property
    def open_consumers(self) -> int:
        """How many consumers are connected now."""
        with self._lock:
            return self._consumers

    @property
    def requests(self) -> Counter[str]:
        """How many calls consumers have made so far, by the method's name; ``"open"`` counts the consumers."""
        with self._lock:
            return Counter(self._requests)

    # Consumers

    def _accept(self) -> None:
        """Serve each consumer in a thread of its own, until the script ends."""
        while True:
            try:
                connection = self._listener.accept()
            except (EOFError, OSError):  # It has ended while it connected.
                if self._is_closed:
                    return
                continue
            if self._is_closed:
                connection.close()
                return
            threading.Thread(target=self._serve, args=(connection,), name="scripted-kafka", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with self._lock:
            self._consumers += 1
            self._requests["open"] += 1
        try:
            with connection:
                settings: dict[str, Any] = connection.recv()
                group = str(settings["group.id"])
                with self._lock:
                    committed = self._committed.setdefault(group, {})
                is_committed = settings.get("isolation.level", "read_committed") == "read_committed"
                reads = ScriptedReads(lambda: self._partitions, self._transactions, committed, is_committed)
                while True:
                    name, *arguments = connection.recv()
                    if self._is_closed:
                        return
                    with self._lock:
                        self._requests[name] += 1
                        away = self._is_away and name not in ("assign", "commit", "seen")
                        answer = None if away else getattr(reads, name)(*arguments)
                        connection.send((not away, self._refusal if away else answer))
        except (EOFError, OSError):
            pass  # The consumer is closed, or its process is gone.
        finally:
            with self._lock:
                self._consumers -= 1

    def _partition(self, topic: str, number: int) -> ScriptedPartition:
        if (topic, number) not in self._partitions:
            raise InvalidArgument(f"found no partition {topic}[{number}], expected one that create_topic has made")
        return self._partitions[topic, number]


def _bytes(part: bytes | str | None) -> bytes | None:
    return part.encode() if isinstance(part, str) else part
