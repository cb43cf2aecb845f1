"""A Kafka broker for tests that has transactions, inside the test's process."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from luminosity._shared.text import list_some
from luminosity.errors import InvalidArgument, KafkaError
from luminosity.extras import require
from luminosity.io.kafka.record import KafkaRecord
from luminosity.testing.kafka_in_tests import KafkaInTests, check_partitions, error_codes
from luminosity.testing.transactional.coordinator import CommittedOffset
from luminosity.testing.transactional.requests import KINDS, Answers

__all__ = ["TransactionalKafka"]

_HOST = "127.0.0.1"
_TIMEOUT_S = 30.0  # a slow machine needs a second; only a test that fails waits for all of it
_POLL_S = 0.1  # how late a poll notices that the time is over, and the broker that a transaction has timed out
_READ = 10_000  # records that a poll returns at most
_MOST_REQUEST = 1 << 27  # bytes; a larger number is no request of Kafka's protocol
_LONGEST_S = 900.0  # the default of brokers


class TransactionalKafka(KafkaInTests):
    """A Kafka for tests with transactions: a small broker in Python, which speaks Kafka's protocol over TCP.

    What ``KafkaBroker`` lacks it has: readers with ``read_committed`` don't see the records of aborted transactions,
    and none behind the first open one; a producer with the transactional id of another one fences it. Clients of any
    process on this machine can connect. Leave the ``with`` block, and it is gone.

    >>> from confluent_kafka import Producer
    >>> with TransactionalKafka({"payments": 1}) as kafka:
    ...     producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": "till"})
    ...     producer.init_transactions(10)
    ...     for value, end in (("10 EUR", producer.abort_transaction), ("20 EUR", producer.commit_transaction)):
    ...         producer.begin_transaction()
    ...         producer.produce("payments", value)
    ...         assert producer.flush(10) == 0
    ...         end()
    ...     [record.value for record in kafka.consume("payments")]
    ...     [record.value for record in kafka.consume("payments", isolation_level="read_uncommitted")]
    [b'20 EUR']
    [b'10 EUR', b'20 EUR']

    It is one broker, which keeps a gigabyte of records in memory and refuses more. Groups have committed offsets, but
    no members: consumers ``assign`` partitions, as ``ReadKafka`` does. It can't look for offsets by time, and its
    topics are those that you create.

    Args:
        topics: the topics to create, with the number of their partitions.
        transactions: whether the broker has transactions. Old ones, and some that speak Kafka's protocol, have none.
        longest_transaction_s: the longest timeout that producers may ask for (``transaction.max.timeout.ms``).
    """

    _sent_instead = ("address", "kafka.bootstrap_servers")

    def __init__(
        self,
        topics: Mapping[str, int] | None = None,
        *,
        transactions: bool = True,
        longest_transaction_s: float = _LONGEST_S,
    ) -> None:
        self._kafka = require("confluent_kafka", extra="kafka")
        self._listener = socket.create_server((_HOST, 0), backlog=64)
        address = _HOST, int(self._listener.getsockname()[1])
        self._servers = f"{address[0]}:{address[1]}"
        self._answers = Answers(address, longest_transaction_s, has_transactions=transactions)
        self._connections: set[socket.socket] = set()
        self._lost: dict[int, int] = {}  # by kind of request, how many answers are lost
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        for name, partitions in (topics or {}).items():
            self.create_topic(name, partitions)
        threading.Thread(target=self._accept, name="transactional-kafka", daemon=True).start()
        threading.Thread(target=self._abort_late, name="transactional-kafka-timeouts", daemon=True).start()

    @property
    def bootstrap_servers(self) -> str:
        """The address of the broker, as clients take it: ``127.0.0.1:40001``."""
        return self._servers

    def close(self) -> None:
        """Stop the broker and drop all records. A second call does nothing."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._answers.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Create a topic that does not exist yet."""
        check_partitions(partitions)
        if not self._answers.create_topic(name, partitions):
            raise InvalidArgument(f"found the topic {name!r}, which exists, expected a new one")

    def produce_many(
        self, topic: str, values: Iterable[bytes | str | tuple[Any, Any]], *, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """Write records without a transaction, each a value or a tuple of key and value, and wait for them.

        Keys choose partitions as from Java's clients; values without a key go to all partitions in turn.
        """
        producer = self._kafka.Producer(
            {
                "bootstrap.servers": self._servers,
                "partitioner": "murmur2_random",
                "linger.ms": 5,
                "acks": 1,
                "queue.buffering.max.messages": 0,
                "log_level": 2,
            }
        )
        failures: list[str] = []

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                failures.append(f"{topic}[{message.partition()}]: {error.str()}")

        count = len(producer.list_topics(topic, timeout=timeout_s).topics[topic].partitions) or 1
        for number, record in enumerate(values):
            key, value = record if isinstance(record, tuple) else (None, record)
            place = {} if key is not None else {"partition": number % count}
            producer.produce(topic, value, key, on_delivery=delivered, **place)
            producer.poll(0)
        if left := producer.flush(timeout_s):
            producer.purge()
            raise KafkaError(f"{topic}: {left} records were not delivered within {timeout_s:g} s")
        if failures:
            raise KafkaError(f"{len(failures)} records were not delivered: {list_some(failures, 3)}")

    def consume(
        self, topic: str, *, isolation_level: str = "read_committed", timeout_s: float = _TIMEOUT_S
    ) -> list[KafkaRecord]:
        """Return the records of a topic that a consumer sees now, as ``KafkaRecord``s, by partition and offset."""
        consumer = self._kafka.Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": "luminosity-testing",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": isolation_level,
                "log_level": 2,
            }
        )
        deadline = time.monotonic() + timeout_s
        found: list[KafkaRecord] = []
        try:
            partitions = consumer.list_topics(topic, timeout=timeout_s).topics[topic].partitions
            waiting = set(partitions)
            consumer.assign([self._kafka.TopicPartition(topic, partition, 0) for partition in partitions])
            while waiting:
                if time.monotonic() > deadline:
                    raise KafkaError(f"{topic}: found {len(found)} records within {timeout_s:g} s, expected more")
                for message in consumer.consume(_READ, _POLL_S):
                    error = message.error()
                    if error is None:
                        found.append(_record(message))
                    elif error.name() == "_PARTITION_EOF":
                        waiting.discard(message.partition())
        finally:
            consumer.close()
        return sorted(found, key=lambda record: (record.partition, record.offset))

    def count(self, topic: str) -> int:
        """Return how many committed records a topic has, without reading them."""
        return self._answers.count(topic)

    def committed(self, group: str) -> dict[tuple[str, int], CommittedOffset]:
        """Return what a group has committed: by topic and partition, the offset and its metadata."""
        return self._answers.committed(group)

    def forget_group(self, group: str) -> None:
        """Forget the offsets of a group, as brokers do after ``offsets.retention.minutes``."""
        self._answers.forget_group(group)

    @property
    def transactions(self) -> tuple[int, int]:
        """How many transactions were committed, and how many aborted."""
        return self._answers.transactions()

    def fail_requests(self, kind: str, *errors: str | int) -> None:
        """Answer the next requests of a kind, such as ``"end_txn"``, with errors, one each, and do nothing else.

        Errors are names of errors of ``confluent_kafka.KafkaError``, or their numbers.
        """
        self._answers.fail(_kind(kind), error_codes(errors))

    def lose_answers(self, kind: str, count: int = 1) -> None:
        """Do what the next requests of a kind ask for, but close the connection instead of answering."""
        with self._lock:
            self._lost[_kind(kind)] = count

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=[connection], name="transactional-kafka", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError, struct.error):
                while len(head := stream.read(4)) == 4 and not self._is_closed.is_set():
                    size = int.from_bytes(head, "big")
                    if size > _MOST_REQUEST or len(request := stream.read(size)) < size:
                        return
                    answer = self._answer(request)
                    if answer is None:
                        return
                    connection.sendall(answer)
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, request: bytes) -> bytes | None:
        """Return the answer with its header, empty if the client wants none; None closes the connection."""
        kind, version, number, name = struct.unpack_from(">hhih", request)
        found = self._answers.answer(kind, version, request[10 + max(0, name) :])
        with self._lock:
            if self._lost.get(kind, 0) > 0:
                self._lost[kind] -= 1
                return None
        if found is None:
            return b"" if kind == KINDS["produce"] else None
        return struct.pack(">ii", len(found) + 4, number) + found

    def _abort_late(self) -> None:
        while not self._is_closed.wait(_POLL_S):
            self._answers.abort_late()


def _kind(name: str) -> int:
    if name not in KINDS:
        raise InvalidArgument(f"found the kind of request {name!r}, expected one of {', '.join(KINDS)}")
    return KINDS[name]


def _record(message: Any) -> KafkaRecord:
    kind, timestamp = message.timestamp()
    return KafkaRecord(
        message.topic(),
        message.partition(),
        message.offset(),
        timestamp,
        kind,
        message.key(),
        message.value(),
        tuple(message.headers() or ()),
    )
