"""A producer that is kept between bundles, and knows which of its failures are the fault of a record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from luminosity._shared.text import shorten_repr
from luminosity.errors import KafkaError
from luminosity.extras import require
from luminosity.io.kafka.client import KafkaClient, describe
from luminosity.io.kafka.outgoing import Outgoing
from luminosity.io.outage import OutageLog

__all__ = ["DEFAULTS", "MESSAGE_MAX_BYTES", "OWN_SETTINGS", "REFUSED", "BundleProducer", "DeliveryFailure"]

_FLUSH_GRACE_S = 5.0  # librdkafka reports records that time out once a second
_POLL_S = 0.1  # how late a full queue notices that it has room
_FLUSH_S = 1.0  # how often it is looked whether Kafka takes records
_POLL_EVERY = 256  # records: reports of deliveries take room in the queue until they are polled
# librdkafka asks for the number of an idempotent producer half a second after it was made, or when metadata arrives.
_ASKS_ITSELF_S = 0.5
_ANSWERS = 2  # the first one replaces the connection that has brought it, so that there is none to ask on
_KEY_SHOWN = 60  # characters of a key in messages

OWN_SETTINGS = {
    "delivery.report.only.error": "with_exception_handling()",
    "delivery.timeout.ms": "delivery_timeout_s=",
    "message.timeout.ms": "delivery_timeout_s=",
    "transactional.id": "exactly_once=",
    "transaction.timeout.ms": "delivery_timeout_s=",
}
"""Settings that ``config=`` can't have, with what to use instead."""

MESSAGE_MAX_BYTES = 1_048_588  # the default of brokers, so that records of 1 MB fit
DEFAULTS = {
    "enable.idempotence": True,  # no duplicates and no changes of order when requests are retried
    "linger.ms": 20,  # how long a record waits for others of its partition; a request costs as much as ten records
    "message.max.bytes": MESSAGE_MAX_BYTES,
    "partitioner": "murmur2_random",  # as Java's clients: a key has the same partition, whoever writes it
    "queue.buffering.max.kbytes": 65_536,  # memory for records that Kafka does not have yet
    "reconnect.backoff.ms": 20,  # half of it passes between the connections to the first and the next broker
    "reconnect.backoff.max.ms": 1_000,  # how late the end of an outage is noticed
}
"""Settings that producers have unless ``config=`` says otherwise."""
# A broker refuses all records of a request with these, though one of them may be at fault alone.
_OF_A_BATCH = frozenset(
    {"MSG_SIZE_TOO_LARGE", "INVALID_MSG", "INVALID_MSG_SIZE", "INVALID_RECORD", "INVALID_TIMESTAMP"}
    | {"RECORD_LIST_TOO_LARGE", "POLICY_VIOLATION", "_INVALID_DIFFERENT_RECORD"}
)
# The record, or its topic, is refused: another attempt would be, too.
_RECORDS_FAULT = _OF_A_BATCH | {
    *("TOPIC_EXCEPTION", "TOPIC_AUTHORIZATION_FAILED", "UNKNOWN_TOPIC_OR_PART", "UNSUPPORTED_FOR_MESSAGE_FORMAT"),
    *("_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "_INVALID_ARG", "_BAD_MSG"),
}
REFUSED = frozenset({"CLUSTER_AUTHORIZATION_FAILED", "SASL_AUTHENTICATION_FAILED", "_AUTHENTICATION"})
"""Errors for a client that has no right to write. A retry has none either."""


class DeliveryFailure:
    """Why Kafka does not have a record."""

    def __init__(self, error: Any, topic: str, partition: int | None, key: bytes | None, size: int) -> None:
        self.name: str = error.name()
        self.topic = topic
        self.partition = partition if partition is not None and partition >= 0 else None
        self.key = key
        self.is_records_fault = self.name in _RECORDS_FAULT
        self.may_be_anothers_fault = self.name in _OF_A_BATCH
        self._size = size
        self._words = describe(error)

    @property
    def reason(self) -> str:
        """The place of the record and the words of the error."""
        where = self.topic if self.partition is None else f"{self.topic}[{self.partition}]"
        key = "no key" if self.key is None else f"key {shorten_repr(self.key, _KEY_SHOWN)}"
        return f"{where}, {key}, {self._size} bytes: {self._words}"

    def error(self) -> KafkaError:
        """Return the error that fails the bundle."""
        may_pass = not self.is_records_fault and self.name not in REFUSED
        fix = "check the record, or pass it on with WriteKafka(...).with_exception_handling()"
        return KafkaError(
            f"Kafka does not take a record: {self.reason}",
            fix=fix if self.is_records_fault else None,
            may_pass=may_pass,
        )


class BundleProducer:
    """Sends the records of one bundle after another, each time waiting until Kafka has all. For one thread at a time.

    The connection is made with the first record, and stays open until ``abandon``.
    """

    def __init__(self, client: KafkaClient, delivery_timeout_s: float) -> None:
        self._client = client
        self._timeout_s = delivery_timeout_s
        self._kafka: Any = None
        self._producer: Any = None
        self._outage = OutageLog(f"the brokers at {client.servers}", "writing")
        self._topic = ""
        self._sent = 0
        self._has_number = True  # whether the first delivery need not wait for the number of an idempotent producer
        self._trouble = ""
        self._report = _Report(self._note_failure)
        self.failure: DeliveryFailure | None = None

    def send(self, record: Outgoing, failed: Callable[[DeliveryFailure], None] | None = None) -> None:
        """Queue a record. Blocks while the queue is full.

        ``failed`` is called if Kafka refuses the record: now, in a later call, or in ``wait``. Without it, the first
        failure is in ``failure``.
        """
        topic, value, key, partition, timestamp, headers = record
        producer = self._open(topic) if self._producer is None else self._producer
        report = self._report if failed is None else _Report(failed)
        deadline = 0.0
        while True:
            try:
                # The callback has two names; the client looks at the second only if the first is not given.
                producer.produce(topic, value, key, partition, report, report, timestamp, headers)
                break
            except BufferError:
                deadline = deadline or time.monotonic() + self._timeout_s + _FLUSH_GRACE_S
                if time.monotonic() >= deadline:
                    raise self._stuck() from None
                self._note_wait(producer.poll(_POLL_S), time.monotonic())
            except self._kafka.KafkaException as error:
                size = len(value or b"") + len(key or b"")
                found = DeliveryFailure(error.args[0], topic, None if partition < 0 else partition, key, size)
                found.may_be_anothers_fault = False  # The client itself refuses it.
                (failed or self._note_failure)(found)
                return
        self._sent += 1
        if self._sent % _POLL_EVERY == 0:
            producer.poll(0)

    def wait(self) -> None:
        """Wait until each record is delivered or has failed. Raises ``KafkaError`` if that takes too long."""
        if self._producer is None:
            return
        if not self._has_number:
            self._has_number = True
            self._ask_for_number()
        now = time.monotonic()
        until, waiting = now + self._timeout_s + _FLUSH_GRACE_S, len(self._producer)
        while left := self._producer.flush(max(0.0, min(_FLUSH_S, until - now))):
            now = time.monotonic()
            if now >= until:
                raise self._stuck()
            self._note_wait(waiting - left, now)
            waiting = left
        self._outage.note_answer()

    def _note_wait(self, reports: int, now: float) -> None:
        """Note that this thread waits for Kafka, which has taken ``reports`` records meanwhile."""
        if reports > 0:
            self._outage.note_answer()
        elif self._outage.since is None:
            self._trouble = ""
            self._outage.note_silence("", now)
        else:
            self._outage.note_silence(
                self._trouble or "they don't answer", waiting=f", and {len(self._producer):,} records wait for them"
            )

    def _ask_for_number(self) -> None:
        """Ask for metadata, with which an idempotent producer asks for its number. Blocks for half a second at most.

        If brokers don't answer, ``flush`` waits for them, and says so.
        """
        until = time.monotonic() + min(_ASKS_ITSELF_S, self._timeout_s)
        with contextlib.suppress(self._kafka.KafkaException):
            for _ in range(_ANSWERS):
                self._producer.list_topics(self._topic, timeout=max(0.0, until - time.monotonic()))

    def forget(self) -> None:
        """Forget the failure, and the records that a failed bundle has left in the queue."""
        if self._producer is not None and len(self._producer):
            self.abandon()
        self.failure = None

    def abandon(self) -> None:
        """Drop the records that wait, and the connection: what is sent next must not come behind a new attempt."""
        if self._producer is not None:
            self._producer.purge()
            self._producer.flush(0)
            self._producer = None

    def _open(self, topic: str) -> Any:
        """Make a producer, which connects on its own. ``topic`` is that of its first record."""
        self._kafka = require("confluent_kafka", "kafka")
        self._producer = self._client.producer(
            {
                **{name: value for name, value in DEFAULTS.items() if not self._client.has(name)},
                "message.timeout.ms": round(self._timeout_s * 1000),
                "delivery.report.only.error": True,
            },
            self._note_trouble,
        )
        self._topic = topic
        self._has_number = self._client.has("enable.idempotence")  # then it may not need one
        return self._producer

    def _note_trouble(self, error: Any) -> None:
        self._trouble = describe(error)

    def _note_failure(self, failure: DeliveryFailure) -> None:
        self.failure = self.failure or failure

    def _stuck(self) -> KafkaError:
        waiting = len(self._producer)
        self.abandon()
        last = f": {self._trouble}" if self._trouble else ""
        return KafkaError(
            f"{self._client.servers}: {waiting} records were not delivered within {self._timeout_s:g} s{last}",
            may_pass=True,
        )


class _Report:
    """Takes a delivery report. The client calls it in the thread that polls, for failed records alone."""

    __slots__ = ("_failed",)

    def __init__(self, failed: Callable[[DeliveryFailure], None]) -> None:
        self._failed = failed

    def __call__(self, error: Any, message: Any) -> None:
        if error is not None:
            key, value = message.key(), message.value()
            size = len(key or b"") + len(value or b"")
            self._failed(DeliveryFailure(error, message.topic(), message.partition(), key, size))
