"""Transactions of one shard of an exactly-once sink, and what Kafka knows of those before."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from luminosity.errors import Fix, KafkaError
from luminosity.extras import require
from luminosity.io.kafka.client import KafkaClient, describe
from luminosity.io.kafka.exactly_once.batches import Batch
from luminosity.io.kafka.outgoing import Outgoing
from luminosity.io.kafka.producer import DEFAULTS, REFUSED, DeliveryFailure

__all__ = ["Progress", "ShardProducer", "check_transactions", "foreign", "saved_progress", "shard_id"]

_GRACE_S = 5.0  # how much longer a transaction may be open than its records may wait
_POLL_S = 0.1  # how late a full queue notices that it has room
_POLL_EVERY = 256  # records: reports of deliveries take room in the queue until they are polled
_ABORT_S = 2.0  # for an abort, which only lets readers see later records sooner
_PARTITION = 0  # under which a group keeps the number: every topic has this partition
_MOST_STARTS = 20  # of which a group's metadata tells: brokers take 4,096 bytes, and each start needs 30
_REBOOTSTRAPS = 0x020B0000  # the version of librdkafka that asks the first addresses again if no broker answers
_SUFFIX = "check"  # of the transactional id with which a pipeline asks whether it may use transactions


class Progress(NamedTuple):
    """What Kafka has of a shard. Committed in each transaction, as the offset of a group and its metadata."""

    run: str
    """The identity of the run, which its checkpoint keeps."""
    next: int
    """The number of the first batch that the topic does not have."""
    starts: tuple[tuple[str, int], ...]
    """The processes that have numbered the batches, each with its first number; the newest last."""

    def maker_of(self, number: int) -> str | None:
        """Return the start that has numbered this batch, if it is known and the topic has the batch.

        >>> progress = Progress("run", 9, (("a", 2), ("b", 5)))
        >>> [progress.maker_of(number) for number in (1, 2, 5, 8, 9)]
        [None, 'a', 'b', 'b', None]
        """
        if number >= self.next:
            return None
        return next((start for start, first in reversed(self.starts) if first <= number), None)

    def with_batch(self, number: int, start: str) -> Progress:
        """Return the progress once the topic has this batch, too."""
        starts = self.starts if self.starts and self.starts[-1][0] == start else (*self.starts, (start, number))
        return Progress(self.run, number + 1, starts[-_MOST_STARTS:])

    def encode(self) -> str:
        """Return it as the metadata of an offset.

        >>> progress = Progress("run", 9, (("a", 2), ("b", 5)))
        >>> Progress.decode(progress.encode(), 9) == progress
        True
        """
        return json.dumps({"run": self.run, "starts": self.starts}, separators=(",", ":"))

    @classmethod
    def decode(cls, metadata: str, offset: int) -> Progress:
        """Read what ``encode`` has returned. Raises ``ValueError`` or ``KeyError`` if something else wrote it."""
        found = json.loads(metadata.rstrip("\0"))
        return cls(found["run"], offset, tuple((start, first) for start, first in found["starts"]))


def shard_id(name: str, shard: int) -> str:
    """Return the transactional id of a shard, which is also the name of its group.

    >>> shard_id("orders", 3)
    'orders-3'
    """
    return f"{name}-{shard}"


def saved_progress(client: KafkaClient, group: str, topic: str, timeout_s: float) -> tuple[Progress | None, Any]:
    """Return what the group has committed, and the metadata of the group as a producer takes it."""
    kafka = require("confluent_kafka", "kafka")
    trouble: list[str] = []
    consumer = client.consumer(
        {"group.id": group, "enable.auto.commit": False, "isolation.level": "read_committed"},
        lambda error: trouble.append(describe(error)),
    )
    try:
        found = consumer.committed([kafka.TopicPartition(topic, _PARTITION)], timeout=timeout_s)[0]
        if found.error is not None:
            raise kafka.KafkaException(found.error)
        if found.offset < 0:
            return None, consumer.consumer_group_metadata()
        return Progress.decode(found.metadata or "", found.offset), consumer.consumer_group_metadata()
    except kafka.KafkaException as error:
        raise _failed(f"the offsets of the group {group!r} can't be read", error.args[0], trouble) from None
    except (ValueError, KeyError, TypeError):
        raise KafkaError(
            f"found offsets in the group {group!r} that no sink has committed, expected a group of this sink alone",
            fix=Fix("pass another name as exactly_once= to WriteKafka"),
        ) from None
    finally:
        consumer.close()


def check_transactions(client: KafkaClient, name: str, topic: str, delivery_timeout_s: float, timeout_s: float) -> None:
    """Raise ``KafkaError`` if brokers have no transactions, or don't let this client use them."""
    kafka = require("confluent_kafka", "kafka")
    trouble: list[str] = []
    producer = client.producer(
        _settings(client, f"{name}-{_SUFFIX}", delivery_timeout_s), lambda error: trouble.append(describe(error))
    )
    try:
        found = producer.list_topics(topic, timeout=timeout_s).topics[topic]
        if found.error is not None:
            raise _failed(f"the topic {topic!r} can't be written", found.error, trouble)
        producer.init_transactions(timeout_s)
    except kafka.KafkaException as error:
        raise _failed(f"{client.servers}: transactions can't be used", error.args[0], trouble) from None


def _failed(what: str, error: Any, trouble: Sequence[str] = ()) -> KafkaError:
    """Return our error for one of the client."""
    name = error.name()
    fixes = {
        "_UNSUPPORTED_FEATURE": "use brokers with transactions (Kafka 0.11 or newer), or leave out exactly_once=",
        "UNSUPPORTED_VERSION": "use brokers with transactions (Kafka 0.11 or newer), or leave out exactly_once=",
        "INVALID_TRANSACTION_TIMEOUT": "pass a shorter delivery_timeout_s= to WriteKafka, or raise the brokers' "
        "transaction.max.timeout.ms",
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "allow the user WRITE and DESCRIBE on transactional ids that begin "
        "with the name in exactly_once=",
        "GROUP_AUTHORIZATION_FAILED": "allow the user READ on groups that begin with the name in exactly_once=",
    }
    last = f"; {trouble[-1]}" if trouble and name in ("_TIMED_OUT", "_ALL_BROKERS_DOWN", "_TRANSPORT") else ""
    fix = fixes.get(name)
    may_pass = fix is None and name not in REFUSED
    return KafkaError(f"{what}: {describe(error)}{last}", fix=Fix(fix) if fix else None, may_pass=may_pass)


def _settings(client: KafkaClient, transactional_id: str, delivery_timeout_s: float) -> dict[str, Any]:
    """Return the settings of a producer with transactions."""
    kafka = require("confluent_kafka", "kafka")
    # If it asked its first addresses again, it would wait for ever if connections break while offsets are committed.
    quirk = {"metadata.recovery.strategy": "none"} if kafka.libversion()[1] >= _REBOOTSTRAPS else {}
    return {
        **{name: value for name, value in {**DEFAULTS, **quirk}.items() if not client.has(name)},
        "transactional.id": transactional_id,
        "transaction.timeout.ms": round((delivery_timeout_s + _GRACE_S) * 1000),
        "message.timeout.ms": round(delivery_timeout_s * 1000),
        "enable.idempotence": True,
        "delivery.report.only.error": True,
    }


class ShardProducer:
    """Writes batches of one shard in transactions, each with the number of the next batch. For one thread at a time.

    Opening it fences all producers of the shard that were opened before, and ends their transaction. Then Kafka's
    committed number says which batches are in the topic. After any error, close it and open another one.
    """

    def __init__(
        self, client: KafkaClient, name: str, shard: int, topic: str, run: str, delivery_timeout_s: float
    ) -> None:
        """Open it. Blocks until brokers have answered. Raises ``KafkaError``."""
        self._kafka = require("confluent_kafka", "kafka")
        self._id = shard_id(name, shard)
        self._topic = topic
        self._timeout_s = delivery_timeout_s
        self._failure: DeliveryFailure | None = None
        self._trouble: list[str] = []
        self._sent = 0
        self.is_open = False
        """Whether there is a transaction."""
        self._producer = client.producer(
            _settings(client, self._id, delivery_timeout_s), lambda error: self._trouble.append(describe(error))
        )
        try:
            self._producer.init_transactions(delivery_timeout_s)
        except self._kafka.KafkaException as error:
            raise self._failed("can't begin", error.args[0]) from None
        # Only now: what the last producer had begun to commit is committed.
        saved, self._group = saved_progress(client, self._id, topic, delivery_timeout_s)
        self.is_known = saved is not None
        """Whether Kafka knows anything of this shard, or ``begin_at`` has said where it begins."""
        self.progress = saved or Progress(run, 0, ())
        if self.progress.run != run:
            raise foreign(name, self.progress.run)

    def begin_at(self, number: int) -> None:
        """Let the first batch have this number, if Kafka knows nothing of the shard."""
        self.progress = Progress(self.progress.run, number, ())
        self.is_known = True

    def write(self, batch: Batch) -> None:
        """Write a batch in the transaction, and begin one if there is none. Blocks while the queue is full."""
        try:
            if not self.is_open:
                self._producer.begin_transaction()
                self.is_open = True
            for record in batch.records:
                self._send(record)
        except self._kafka.KafkaException as error:
            raise self._failed("does not take a record", error.args[0]) from None
        self.progress = self.progress.with_batch(batch.number, batch.start)

    def _send(self, record: Outgoing) -> None:
        topic, value, key, partition, timestamp, headers = record
        deadline = 0.0
        while True:
            try:
                self._producer.produce(topic, value, key, partition, self._note, self._note, timestamp, headers)
                break
            except BufferError:
                deadline = deadline or time.monotonic() + self._timeout_s
                if time.monotonic() > deadline:
                    raise KafkaError(
                        f"{self._id}: {len(self._producer)} records wait for brokers since {self._timeout_s:g} s",
                        may_pass=True,
                    ) from None
                self._producer.poll(_POLL_S)
            except self._kafka.KafkaException as error:
                size = len(value or b"") + len(key or b"")
                found = DeliveryFailure(error.args[0], topic, None if partition < 0 else partition, key, size)
                self._failure = self._failure or found
                raise
        self._sent += 1
        if self._sent % _POLL_EVERY == 0:
            self._producer.poll(0)

    def commit(self) -> None:
        """Commit the transaction: its records and its progress, or neither. Does nothing if there is none.

        If it raises, the transaction may be committed nevertheless: the next producer of the shard knows.
        """
        if not self.is_open:
            return
        place = self._kafka.TopicPartition(self._topic, _PARTITION, self.progress.next, self.progress.encode())
        try:
            self._producer.send_offsets_to_transaction([place], self._group, self._timeout_s)
            self._producer.commit_transaction(self._timeout_s + _GRACE_S)
        except self._kafka.KafkaException as error:
            raise self._failed("can't be committed", error.args[0]) from None
        self.is_open = False

    def close(self) -> None:
        """Abort the transaction, if there is one, and drop the connection. Does not raise."""
        # The next producer aborts it if this one can't, or its timeout does.
        with contextlib.suppress(self._kafka.KafkaException, SystemError):
            if self.is_open:
                self._producer.purge()
                self._producer.abort_transaction(_ABORT_S)
        self.is_open = False

    def _note(self, error: Any, message: Any) -> None:
        # After the first failure, all other records of the transaction fail because of it.
        if error is not None and self._failure is None and error.name() != "_PURGE_QUEUE":
            key, value = message.key(), message.value()
            size = len(key or b"") + len(value or b"")
            self._failure = DeliveryFailure(error, message.topic(), message.partition(), key, size)

    def _failed(self, what: str, error: Any) -> KafkaError:
        with contextlib.suppress(self._kafka.KafkaException, SystemError):  # A fenced producer raises either.
            self._producer.poll(0)  # for reports of records that have failed
        if self._failure is not None and self._failure.is_records_fault:
            return self._failure.error()
        return _failed(f"the transaction of {self._id!r} {what}", error, self._trouble)


def foreign(name: str, run: str) -> KafkaError:
    """Return the error for a name that another run has used."""
    return KafkaError(
        f"found exactly_once={name!r}, which another run has used ({run}), expected a name of this run alone: its "
        "checkpoint does not say what the other one has written",
        fix=Fix("continue that run with its checkpoint folder, or pass another name"),
    )
