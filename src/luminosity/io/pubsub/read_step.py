"""The steps that read a subscription: one names it to the readers, the other one is a reader without an end."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import apache_beam as beam
import grpc
from apache_beam.metrics.metric import Metrics
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils import windowed_value

from luminosity.io.outage import OutageLog
from luminosity.io.pubsub.client import Connection, Service, describe, is_transient, until_answered
from luminosity.io.pubsub.progress import GO_ON, LAST, Reading, ReadingTracker, ReadingWatermarks
from luminosity.io.pubsub.puller import Puller, Pullers, Source
from luminosity.io.pubsub.received import MessageReader, Received

__all__ = ["NameSources", "ReadSettings", "ReadSubscription"]

_LOGGER = logging.getLogger(__name__)

_POLL_S = 0.1  # how late a reader notices that it should stop
_SHORT_POLL_S = 0.01  # how long messages that are emitted wait for more
_IDLE_BUNDLE_S = 1.0  # how often an idle reader reports its watermark
_BUSY_BUNDLE_S = 1.0  # messages are acknowledged when their bundle is durable
_MESSAGES_PER_BUNDLE = 20_000
_MESSAGES_PER_CLAIM = 1_000
_LEASE_S = 20  # after so long, others get the messages of a worker that was killed
_EXPIRES_S = 24 * 3600  # the least that Pub/Sub allows: then it removes the subscription of a run that was killed

_GLOBAL = (GlobalWindow(),)
_PULLERS = Pullers()
_READING = beam.DoFn.RestrictionParam()  # The DoFn itself is the provider.
_WATERMARK = beam.DoFn.WatermarkEstimatorParam(ReadingWatermarks())


class ReadSettings(NamedTuple):
    """What the steps need to know. It travels with the pipeline."""

    service: Service
    topic: str | None  # of which to make a subscription
    subscription: str  # the one to read, or to make
    reader: MessageReader
    name: str  # of the step's pullers
    keeps_subscription: bool  # that was made for the run: a durable run may continue with it


class NameSources(beam.DoFn):
    """Makes the subscription of a topic, and passes on what each reader reads."""

    def __init__(self, settings: ReadSettings, readers: int) -> None:
        self._settings = settings
        self._readers = readers

    def process(self, element: Any) -> Iterator[Source]:
        """Yield a source for each reader."""
        settings = self._settings
        connection = settings.service.connect()
        try:
            if settings.topic is not None:
                outage = OutageLog(settings.service.name, "reading")
                until_answered(lambda: self._create(connection, settings.topic or ""), outage)
            lease_s = _lease_s(connection, settings.subscription)
        finally:
            connection.close()
        for reader in range(self._readers):
            yield Source(reader, settings.subscription, lease_s, settings.topic is not None)

    def _create(self, connection: Connection, topic: str) -> None:
        expires_s = None if self._settings.keeps_subscription else _EXPIRES_S
        try:
            connection.create_subscription(self._settings.subscription, topic, _LEASE_S, expires_s)
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call) or error.code() != grpc.StatusCode.ALREADY_EXISTS:
                raise  # it exists if this bundle is run again


def _lease_s(connection: Connection, subscription: str) -> int:
    """Return for how long readers get a message at a time: no longer than the subscription's own deadline."""
    try:
        found = connection.subscription(subscription)
    except grpc.RpcError as error:
        if not is_transient(error):  # who may read a subscription need not have the right to look at it
            _LOGGER.debug("%s: %s", subscription, describe(error))
        return _LEASE_S
    return min(_LEASE_S, found.ack_deadline_seconds or _LEASE_S)


class ReadSubscription(beam.DoFn, beam.RestrictionProvider):
    """Emits messages as they come, packed by shard, and acknowledges them when their bundle is durable.

    Pullers belong to the process, not to the step's copies: the next bundle of a reader may be in another copy.
    """

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._messages = Metrics.counter("ReadFromPubSub", "messages_received")
        self._bytes = Metrics.counter("ReadFromPubSub", "bytes_received")

    def setup(self) -> None:
        """Count as a user of the pullers."""
        _PULLERS.enter(self._settings.name)

    def teardown(self) -> None:
        """Close the pullers if no other copy of the step uses them."""
        _PULLERS.leave(self._settings.name)

    def initial_restriction(self, element: Source) -> Reading:
        """Return a reader at its beginning."""
        return Reading()

    def create_tracker(self, restriction: Reading) -> ReadingTracker:
        """Return a tracker that lets the reader go on until it is asked to stop."""
        return ReadingTracker(restriction)

    def restriction_size(self, element: Source, restriction: Reading) -> int:
        """Return 1: Pub/Sub does not tell a reader how much waits."""
        return 1

    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        element: Source,
        finalizer: Any = beam.DoFn.BundleFinalizerParam,  # first: Beam passes it by position, the others by name
        tracker: Any = _READING,
        watermark: Any = _WATERMARK,
    ) -> Iterator[Any]:
        """Emit messages. Ends when asked to, after a while, or if none come."""
        source = Source(*element)
        settings = self._settings
        bundle = tracker.current_restriction().bundles
        puller = _PULLERS.take(settings.name, source.reader, lambda: Puller(settings.service, source, settings.reader))
        try:
            last_holder = watermark.take_over(puller.holder)
            puller.begin(bundle, last_holder)
            if last_holder:  # A first bundle without messages makes the holder known: see ReadingWatermark.
                yield from self._read_with(puller, bundle, tracker, watermark)
            reached = puller.watermark_micros()
            if reached is not None:
                watermark.move(reached)
            finalizer.register(lambda: puller.acknowledge(bundle))
            tracker.try_claim(LAST)
            tracker.defer_remainder()
        except BaseException:
            puller.restart()
            raise
        finally:
            _PULLERS.give_back(settings.name, source.reader)

    def _read_with(self, puller: Puller, bundle: int, tracker: Any, watermark: Any) -> Iterator[Any]:
        """Emit messages until the bundle should end."""
        began = time.monotonic()
        emitted = 0
        while tracker.try_claim(GO_ON):
            messages = puller.take(_MESSAGES_PER_CLAIM, _SHORT_POLL_S if emitted else _POLL_S)
            if messages:
                puller.emitted(bundle, messages)
                yield from _packed(messages, watermark.current_watermark().micros)
                emitted += len(messages)
                self._messages.inc(len(messages))
                self._bytes.inc(sum(len(each.payload) for each in messages))
            lasted = time.monotonic() - began
            if emitted and (not messages or lasted >= _BUSY_BUNDLE_S or emitted >= _MESSAGES_PER_BUNDLE):
                return  # What is emitted is seen by others when the bundle has ended.
            if not emitted and lasted >= _IDLE_BUNDLE_S:
                return


def _packed(messages: list[Received], micros: int) -> Iterator[Any]:
    """Yield the messages of each shard as one element, which must not be late itself."""
    shards: dict[int, list[tuple[bytes, int, bytes]]] = {}
    for each in messages:
        shards.setdefault(each.shard, []).append((each.digest, each.micros, each.payload))
    for shard, packed in shards.items():
        yield windowed_value.create((shard, pickle.dumps(packed, 5)), micros, _GLOBAL)
