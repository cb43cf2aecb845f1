"""A Kafka broker for tests, inside the test's process."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from luminosity._shared.text import list_some
from luminosity.errors import InvalidArgument, KafkaError
from luminosity.extras import require
from luminosity.io.kafka.record import KafkaRecord
from luminosity.testing.kafka_in_tests import KafkaInTests, check_partitions, error_codes
from luminosity.testing.mock_cluster import MockCluster

__all__ = ["KafkaBroker"]

_TIMEOUT_S = 30.0  # a slow machine needs a second; only a test that fails waits for all of it
_POLL_S = 0.1  # how late a poll notices that the time is over
_FETCH = 1_000  # records that a poll returns at most

# The numbers of Kafka's protocol.
_REQUESTS = {
    "produce": 0,
    "fetch": 1,
    "list_offsets": 2,
    "metadata": 3,
    "offset_commit": 8,
    "offset_fetch": 9,
    "find_coordinator": 10,
    "join_group": 11,
    "heartbeat": 12,
    "leave_group": 13,
    "sync_group": 14,
    "init_producer_id": 22,
    "add_partitions_to_txn": 24,
    "add_offsets_to_txn": 25,
    "end_txn": 26,
    "txn_offset_commit": 28,
}
_ARGUMENTS = frozenset({"value", "key", "headers", "timestamp", "partition"})


class KafkaBroker(KafkaInTests):
    """A Kafka for tests, inside this process: librdkafka's mock cluster, which speaks Kafka's protocol over TCP.

    It starts in a tenth of a second and needs no Java. Clients of any process on this machine can connect to
    ``bootstrap_servers``, so the workers of a pipeline can, too. Leave the ``with`` block, and it is gone.

    >>> with KafkaBroker(topics={"reviews": 4}) as broker:
    ...     broker.produce("reviews", "good", key="id-1", headers=[("lang", b"en")])
    ...     broker.produce("reviews", None, key="id-2", partition=3)  # a tombstone
    ...     [(record.key, record.value) for record in broker.consume("reviews")]
    [(b'id-1', b'good'), (b'id-2', None)]

    Brokers have the numbers 1, 2, and so on. A test can stop and start them, move the leader of a partition, delay all
    responses, and let requests fail.

    It is not a full Kafka. It keeps about 5 MB (and 100,000 batches) of a partition, and drops older records. It can't
    look for offsets by time, create topics through an admin client, or hide the records of aborted transactions: for
    these there is ``ScriptedKafka``. Topics that a client asks for are created with 4 partitions.

    Args:
        topics: the topics to create, with the number of their partitions.
        brokers: the number of brokers.
    """

    _sent_instead = ("address", "broker.bootstrap_servers")

    def __init__(self, topics: Mapping[str, int] | None = None, *, brokers: int = 1) -> None:
        if brokers < 1:
            raise InvalidArgument(f"found brokers={brokers}, expected at least 1")
        self._kafka = require("confluent_kafka", extra="kafka")
        self._brokers = brokers
        self._deleted: dict[tuple[str, int], int] = {}
        self._producer: Any = None
        self._cluster = MockCluster(brokers)
        try:
            for name, partitions in (topics or {}).items():
                self.create_topic(name, partitions)
        except BaseException:
            self._cluster.close()
            raise

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of the brokers, as clients take them: ``127.0.0.1:40001,127.0.0.1:40002``."""
        return self._cluster.addresses

    def close(self) -> None:
        """Stop all brokers and drop all records. A second call does nothing."""
        self._producer = None  # It has delivered everything: produce waits.
        self._cluster.close()

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Create a topic that does not exist yet. All brokers have a copy; they lead its partitions in turn."""
        check_partitions(partitions)
        self._cluster.create_topic(name, partitions, self._brokers)

    def produce(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Sequence[tuple[str, bytes | str | None]] = (),
        timestamp: int | None = None,
        partition: int | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """Write one record, and wait until the broker has it.

        Args:
            topic: the topic.
            value: the value; None makes a tombstone.
            key: the key; records with the same key have the same partition.
            headers: names and values, in order; names may repeat.
            timestamp: milliseconds since 1970, by default now. librdkafka can't write 0.
            partition: the partition, by default one that follows from the key.
            timeout_s: raise ``KafkaError`` if the broker does not have the record by then.
        """
        record = {"value": value, "key": key, "headers": headers, "timestamp": timestamp, "partition": partition}
        self.produce_many(topic, [record], timeout_s=timeout_s)

    def produce_many(
        self,
        topic: str,
        records: Iterable[bytes | str | tuple[Any, Any] | Mapping[str, Any] | None],
        *,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """Write records, and wait until the broker has all of them.

        A record is a value, a tuple of key and value, or a dict with the arguments of ``produce``.

        >>> with KafkaBroker({"words": 1}) as broker:
        ...     broker.produce_many("words", ["a", ("key", "b"), {"value": "c", "timestamp": 1_000}])
        ...     [(record.value, record.key) for record in broker.consume("words")]
        [(b'a', None), (b'b', b'key'), (b'c', None)]
        """
        self._cluster.check_open()
        producer = self._own_producer()
        deadline = time.monotonic() + timeout_s
        failures: list[str] = []

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                failures.append(f"{topic}[{message.partition()}]: {error.str()}")

        for record in records:
            arguments = _arguments(record)
            while True:
                try:
                    producer.produce(topic, on_delivery=delivered, **arguments)
                    break
                except BufferError:
                    if time.monotonic() >= deadline:
                        raise self._not_delivered(producer, topic, timeout_s) from None
                    producer.poll(_POLL_S)
            producer.poll(0)
        if producer.flush(max(0.0, deadline - time.monotonic())):
            raise self._not_delivered(producer, topic, timeout_s)
        if failures:
            raise KafkaError(f"{len(failures)} records were not delivered: {list_some(failures, 3)}")

    def consume(
        self, topic: str, count: int | None = None, *, timeout_s: float = _TIMEOUT_S, complete: bool = True
    ) -> list[KafkaRecord]:
        """Return the records of a topic as ``KafkaRecord``s, by partition and offset.

        Args:
            topic: the topic.
            count: wait until the topic has so many records. By default, return the records that it has now.
            timeout_s: raise ``KafkaError`` if reading them takes longer.
            complete: raise ``KafkaError`` if the broker has dropped records because a partition had more than 5 MB.
                False returns the records that are left.
        """
        self._cluster.check_open()
        deadline = time.monotonic() + timeout_s
        present: int | None = None
        consumer = self._kafka.Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": f"luminosity-testing-{uuid.uuid4().hex}",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "reconnect.backoff.ms": 10,
                "reconnect.backoff.max.ms": 100,
                "log_level": 2,
            }
        )
        try:
            while True:
                ranges = self._ranges(consumer, topic, deadline, complete)
                present = sum(end - start for start, end in ranges.values())
                if count is None or present >= count:
                    return self._read(consumer, topic, ranges, deadline, timeout_s)
                if time.monotonic() >= deadline:
                    raise KafkaError(f"{topic}: found {present} records, expected {count} within {timeout_s:g} s")
                time.sleep(_POLL_S)
        except self._kafka.KafkaException as error:
            if count is not None and present is not None and time.monotonic() >= deadline:
                raise KafkaError(f"{topic}: found {present} records, expected {count} within {timeout_s:g} s") from None
            raise KafkaError(f"{topic}: can't be read: {error.args[0].str()}") from error
        finally:
            consumer.close()

    def stop_broker(self, broker: int | None = None) -> None:
        """Make a broker, or all, unreachable. Its partitions keep their leader, and their records."""
        self._cluster.stop_broker(broker)

    def start_broker(self, broker: int | None = None) -> None:
        """Make a broker, or all, reachable again, at the same address."""
        self._cluster.start_broker(broker)

    def set_leader(self, topic: str, partition: int, broker: int | None) -> None:
        """Make another broker the leader of a partition. None leaves the partition without a leader."""
        self._cluster.set_leader(topic, partition, broker)

    def set_delay(self, delay_s: float, broker: int | None = None) -> None:
        """Let a broker, or all, send each response this much later. 0 ends it."""
        self._cluster.set_delay(round(delay_s * 1000), broker)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Let a partition begin at offset ``before``, as Kafka does when records reach the topic's retention time."""
        self._cluster.delete_records(topic, partition, before)
        self._deleted[topic, partition] = max(before, self._deleted.get((topic, partition), 0))

    def fail_requests(self, kind: str, *errors: str | int) -> None:
        """Answer the next requests of a kind with errors, one each, whichever client sends them.

        >>> with KafkaBroker({"words": 1}) as broker:
        ...     broker.fail_requests("produce", "NOT_LEADER_FOR_PARTITION", "REQUEST_TIMED_OUT", "_TRANSPORT")
        ...     broker.produce("words", "a")  # the client tries again, so that it arrives
        ...     [record.value for record in broker.consume("words")]
        [b'a']

        Args:
            kind: the kind of request: ``"produce"``, ``"fetch"``, ``"metadata"``, ``"list_offsets"``,
                ``"offset_commit"``, ``"init_producer_id"``, and others.
            errors: names of errors of ``confluent_kafka.KafkaError``, or their numbers. ``"_TRANSPORT"`` closes the
                connection.
        """
        self._cluster.push_errors(_request(kind), error_codes(errors))

    def clear_failures(self, kind: str) -> None:
        """Forget the errors for a kind of request that no client has received yet."""
        self._cluster.clear_errors(_request(kind))

    def _own_producer(self) -> Any:
        if self._producer is None:
            self._producer = self._kafka.Producer(
                {
                    "bootstrap.servers": self.bootstrap_servers,
                    "max.in.flight": 1,  # keeps the order when requests fail; an idempotent producer starts in 0.5 s
                    "linger.ms": 0,
                    "partitioner": "murmur2_random",  # as Java's clients
                    "retry.backoff.ms": 10,
                    "message.max.bytes": 10_000_000,
                    "reconnect.backoff.ms": 10,
                    "reconnect.backoff.max.ms": 100,
                    "log_level": 2,  # a broker that a test stops is no news
                }
            )
        return self._producer

    def _not_delivered(self, producer: Any, topic: str, timeout_s: float) -> KafkaError:
        waiting = len(producer)
        producer.purge()
        self._producer = None
        return KafkaError(f"{topic}: {waiting} records were not delivered within {timeout_s:g} s")

    def _read(
        self, consumer: Any, topic: str, ranges: Mapping[int, tuple[int, int]], deadline: float, timeout_s: float
    ) -> list[KafkaRecord]:
        found: list[KafkaRecord] = []
        ends = {partition: end for partition, (start, end) in ranges.items() if start < end}
        consumer.assign([self._kafka.TopicPartition(topic, partition, ranges[partition][0]) for partition in ends])
        while ends:
            if time.monotonic() >= deadline:
                raise KafkaError(f"{topic}: found {len(found)} records within {timeout_s:g} s, expected more")
            for message in consumer.consume(_FETCH, _POLL_S):
                if message.error() is not None:
                    continue  # The client tries again on its own; the deadline bounds it.
                end = ends.get(message.partition(), 0)
                if message.offset() < end:
                    found.append(_record(message))
                if message.offset() + 1 >= end:
                    ends.pop(message.partition(), None)
        return sorted(found, key=lambda record: (record.partition, record.offset))

    def _ranges(self, consumer: Any, topic: str, deadline: float, complete: bool) -> dict[int, tuple[int, int]]:
        """Return the first offset and the offset after the last, for each partition."""

        def left() -> float:
            return max(0.1, deadline - time.monotonic())

        partitions = consumer.list_topics(topic, timeout=left()).topics[topic].partitions
        ranges: dict[int, tuple[int, int]] = {}
        for partition in partitions:
            start, end = consumer.get_watermark_offsets(self._kafka.TopicPartition(topic, partition), timeout=left())
            if complete and start > self._deleted.get((topic, partition), 0):
                raise KafkaError(
                    f"{topic}[{partition}]: the broker has dropped the records before offset {start}: it keeps about "
                    "5 MB of a partition",
                    fix="create the topic with more partitions, or pass complete=False",
                )
            ranges[partition] = (start, end)
        return ranges


def _arguments(record: Any) -> dict[str, Any]:
    if isinstance(record, Mapping):
        given: dict[str, Any] = dict(record)  # pyright: ignore[reportUnknownArgumentType]
        if unknown := sorted(set(given) - _ARGUMENTS):
            raise InvalidArgument(f"found {unknown} in a record, expected {sorted(_ARGUMENTS)}")
    elif isinstance(record, tuple):
        given = {"key": record[0], "value": record[1]}
    else:
        given = {"value": record}
    if given.get("timestamp") == 0:
        raise InvalidArgument("found timestamp=0, which means now to librdkafka, expected another", fix="pass 1 or -1")
    named = {name: value for name, value in given.items() if value is not None and name != "headers"}
    return {**named, "headers": list(given.get("headers") or ())}


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


def _request(kind: str) -> int:
    if kind not in _REQUESTS:
        raise InvalidArgument(f"found the kind of request {kind!r}, expected one of {', '.join(_REQUESTS)}")
    return _REQUESTS[kind]
