"""The step that publishes messages: in batches, all of which are published when its bundle ends."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.metrics.metric import Metrics

from luminosity.io.outage import OutageLog
from luminosity.io.pubsub.client import Connection, Service, until_answered

__all__ = ["Label", "Publish", "PublishSettings"]

_MESSAGES_PER_CALL = 1_000  # the most that Pub/Sub takes
_BYTES_PER_CALL = 8_000_000  # it takes 10 MB
_BYTES_BETWEEN = 32_000_000  # a bundle publishes when it has so much, and at its end
_MESSAGE_BYTES = 300  # that Python needs for a message besides its content: small ones are mostly that
_CALLS_AT_ONCE = 8  # of different ordering keys


class PublishSettings(NamedTuple):
    """What the steps need to know. It travels with the pipeline."""

    service: Service
    topic: str
    id_label: str | None
    timestamp_attribute: str | None


class Label(beam.DoFn):
    """Adds the attributes that the transform is asked for: an id of each message, and its event time.

    >>> settings = PublishSettings(Service(None), "projects/p/topics/t", "id", None)
    >>> sorted(Label(settings).attributes(0)) == ["id"]
    True
    """

    def __init__(self, settings: PublishSettings) -> None:
        self._settings = settings

    def attributes(self, timestamp: Any) -> dict[str, str]:
        """Return the attributes for a message with this event time."""
        found: dict[str, str] = {}
        if self._settings.id_label is not None:
            found[self._settings.id_label] = uuid.uuid4().hex
        if self._settings.timestamp_attribute is not None:
            millis = int(timestamp.micros) // 1000
            # Elements of a batch have no time, which Beam spells as the earliest one: then the time of publishing.
            found[self._settings.timestamp_attribute] = str(millis if millis >= 0 else time.time_ns() // 1_000_000)
        return found

    def process(self, element: bytes, timestamp: Any = beam.DoFn.TimestampParam) -> Iterator[bytes]:
        """Yield the message with its attributes."""
        message = _message().FromString(element)
        message.attributes.update(self.attributes(timestamp))
        yield message.SerializeToString()


class Publish(beam.DoFn):
    """Publishes messages, given as serialized ``PubsubMessage``.

    A bundle ends when the service has taken all of its messages. If it does not, the bundle fails, and is run again.
    """

    def __init__(self, settings: PublishSettings) -> None:
        self._settings = settings
        self._published = Metrics.counter("WriteToPubSub", "messages_published")
        self._connection: Connection | None = None
        self._callers: ThreadPoolExecutor | None = None
        self._keys: dict[str, list[Any]] = {}
        self._bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None, "_callers": None}

    def setup(self) -> None:
        """Connect."""
        self._connection = self._settings.service.connect()
        self._callers = ThreadPoolExecutor(_CALLS_AT_ONCE, "pubsub-publish")
        self._outage = OutageLog(self._settings.service.name, "publishing")

    def teardown(self) -> None:
        """Disconnect."""
        if self._callers is not None:
            self._callers.shutdown(wait=False, cancel_futures=True)
        if self._connection is not None:
            self._connection.close()

    def start_bundle(self) -> None:
        """Forget messages of a bundle that has failed."""
        self._keys, self._bytes = {}, 0

    def process(self, element: bytes) -> None:
        """Collect a message."""
        message = _message().FromString(element)
        self._keys.setdefault(message.ordering_key, []).append(message)
        self._bytes += _MESSAGE_BYTES + len(element)
        if self._bytes >= _BYTES_BETWEEN:
            self._flush()

    def finish_bundle(self) -> None:
        """Publish what is left. Blocks until the service has all of the bundle's messages."""
        self._flush()

    def _flush(self) -> None:
        keys, self._keys, self._bytes = self._keys, {}, 0
        callers = self._callers
        assert callers is not None, "setup comes first"
        futures = [callers.submit(self._publish, messages) for messages in keys.values()]
        errors = [error for each in futures if (error := each.exception()) is not None]
        if errors:
            raise errors[0]
        self._published.inc(sum(map(len, keys.values())))

    def _publish(self, messages: list[Any]) -> None:
        """Publish the messages of one key, a batch after the other."""
        connection = self._connection
        assert connection is not None, "setup comes first"
        for batch in _batches(messages):
            until_answered(lambda batch=batch: connection.publish(self._settings.topic, batch), self._outage)


def _batches(messages: list[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    size = 0
    for each in messages:
        bytes_ = each.ByteSize()
        if batch and (len(batch) == _MESSAGES_PER_CALL or size + bytes_ > _BYTES_PER_CALL):
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += bytes_
    if batch:
        yield batch


def _message() -> Any:
    from google.pubsub_v1.types import PubsubMessage  # pyright: ignore[reportMissingImports]

    return PubsubMessage.pb()
