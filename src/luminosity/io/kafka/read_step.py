"""The step that reads groups of partitions: a splittable DoFn over offsets."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils import windowed_value

from luminosity.errors import KafkaError
from luminosity.extras import require
from luminosity.io.kafka.client import describe
from luminosity.io.kafka.consumer import ConsumerSettings, GroupConsumer, Pool
from luminosity.io.kafka.emit import Chunk, Emitter, Outputs, Tally
from luminosity.io.kafka.lag_probe import LagProbe
from luminosity.io.kafka.metrics import ReadMetrics
from luminosity.io.kafka.offsets import Position, name_partitions, partitions_of
from luminosity.io.kafka.progress import (
    LAST,
    Claim,
    GroupTracker,
    GroupWatermark,
    GroupWatermarks,
    PartitionGroup,
    Span,
)
from luminosity.io.kafka.record import Partition

__all__ = ["ReadGroup", "ReadSettings", "ReadStream", "check_brokers", "group_of"]

_LOGGER = logging.getLogger(__name__)

_POLL_S = 0.1  # how late a reader notices that it should stop
_SHORT_POLL_S = 0.01  # how long records that are emitted wait for more
_IDLE_BUNDLE_S = 1.0  # how often an idle reader reports its watermark
_BUSY_BUNDLE_S = 1.0  # the longest bundle on a runner that does not ask to stop
_RECORDS_PER_BUNDLE = 50_000
_CHECK_EVERY_S = 0.5  # how often idle partitions are looked at

_NOTHING = Tally().newest
_GLOBAL = (GlobalWindow(),)
_POOL = Pool()

_GROUP = beam.DoFn.RestrictionParam()  # The DoFn itself is the provider.
_WATERMARK = beam.DoFn.WatermarkEstimatorParam(GroupWatermarks())


class ReadSettings(NamedTuple):
    """What the step needs to know. It travels with the pipeline."""

    consumers: ConsumerSettings
    topics: Sequence[str]
    pattern: str | None
    start: Position
    stop: Position | None
    emitter: Emitter
    groups: int
    look_every_s: float
    skips_lost: bool
    skips: Mapping[Partition, Collection[int]] = {}  # offsets of records to pass by


def group_of(partition: Partition, groups: int) -> int:
    """Return the number of the group that a partition belongs to; the partitions of a topic are spread evenly.

    >>> sorted(group_of(("reviews", number), 4) for number in range(4))
    [0, 1, 2, 3]
    """
    topic, number = partition
    return (zlib.crc32(topic.encode()) + number) % groups


class ReadGroup(beam.DoFn, beam.RestrictionProvider):
    """Reads a group of partitions up to an end.

    Consumers belong to the process, not to the step's copies: the next bundle of a group may be in another copy, and
    continues with the same consumer. Each copy of the step counts as a user of them.
    """

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._metrics = ReadMetrics()

    def setup(self) -> None:
        """Count as a user of the consumers."""
        _POOL.enter(self._settings.consumers.name)

    def teardown(self) -> None:
        """Close the consumers if no other copy of the step uses them."""
        _POOL.leave(self._settings.consumers.name)

    def lag_probe(self) -> LagProbe:
        """Return what the runner's process asks for the ends of partitions."""
        return LagProbe(self._settings.consumers)

    # What there is to read

    def initial_restriction(self, element: int) -> PartitionGroup:
        """Ask the brokers for the partitions of the group, and where they begin and end."""
        settings = self._settings
        looked_at = time.time()
        consumer = settings.consumers.open()
        try:
            queries = consumer.queries
            found = queries.partitions(settings.topics, settings.pattern)
            starts_at = queries.resolve(settings.start, found, name="start")
            if settings.stop is not None and not self._stops_later():
                stops = queries.resolve(settings.stop, found, name="stop")
            else:
                stops = {}
            mine = [partition for partition in found if group_of(partition, settings.groups) == element]
            ends = queries.ends(mine)
        finally:
            consumer.close()
        for partition in mine:
            if starts_at[partition] <= ends[partition]:
                continue
            beyond = _beyond_end(partition, starts_at[partition], ends[partition])
            if settings.start.kind == "offsets":
                raise beyond
            # A group may have read records of an open transaction, which `read_committed` does not see yet.
            _LOGGER.warning("%s", beyond.message)
        spans = {
            partition: Span(
                starts_at[partition],
                max(starts_at[partition], stops[partition]) if partition in stops else None,
                ends[partition],
            )
            for partition in mine
        }
        return PartitionGroup(spans, settings.stop is None or self._stops_later(), looked_at)

    def _stops_later(self) -> bool:
        stop = self._settings.stop
        return stop is not None and stop.kind == "time" and stop.time_ms > time.time() * 1000

    def split(self, element: int, restriction: PartitionGroup) -> Generator[PartitionGroup, Any, None]:
        """Cut a group that has an end into its partitions; a stream keeps its groups, which may get new partitions."""
        if restriction.is_open:
            yield restriction
            return
        for partition, span in restriction.spans.items():
            if not span.is_done:
                yield PartitionGroup({partition: span})

    def create_tracker(self, restriction: PartitionGroup) -> GroupTracker:
        """Return a tracker of the offsets of the group."""
        return GroupTracker(restriction)

    def restriction_size(self, element: int, restriction: PartitionGroup) -> int:
        """Return how many records wait."""
        return restriction.backlog

    # Reading

    def process(
        self,
        element: int,
        finalizer: Any = beam.DoFn.BundleFinalizerParam,  # first: Beam passes it by position, the others by name
        tracker: Any = _GROUP,
        watermark: Any = _WATERMARK,
    ) -> Iterator[Any]:
        """Emit the records of the group. Ends when asked to, after a while, or if no records come."""
        group: PartitionGroup = tracker.current_restriction()
        key = element if group.is_open else min(group.spans, default=element)
        consumers = self._settings.consumers
        consumer = _POOL.take(consumers, key)
        try:
            watermark.keep(group.spans)
            watermark.expect(group.spans)
            self._metrics.start()
            yield from self._read_with(consumer, element, tracker, watermark)
            self._metrics.count()
            left: PartitionGroup = tracker.current_restriction()
            positions = {partition: span.start for partition, span in left.spans.items()}
            ends = consumer.known_ends()
            self._metrics.set_lags(element, positions, ends)
            commit = consumer.commit_later(positions, is_last=left.is_done)
            if commit is not None:
                finalizer.register(commit)
            if left.is_done:
                return
            tracker.try_claim(Claim(ends=ends))
            tracker.try_claim(LAST)
            tracker.defer_remainder()
        except BaseException:
            consumer.restart()  # It may be behind records that were not claimed, and that the next bundle must read.
            raise
        finally:
            _POOL.give_back(consumers, key, consumer)

    def _read_with(self, consumer: GroupConsumer, element: int, tracker: Any, watermark: Any) -> Iterator[Any]:
        """Emit records until the bundle should end."""
        began = time.monotonic()
        emitted = 0
        while True:
            self._extend(consumer, element, tracker, watermark)
            group: PartitionGroup = tracker.current_restriction()
            if group.is_done:
                return
            consumer.seek({p: span.start for p, span in group.spans.items() if not span.is_done})
            messages = consumer.poll(consumer.chunk, _SHORT_POLL_S if emitted else _POLL_S)
            now_micros = time.time_ns() // 1000
            chunk = Chunk(messages, group.spans)
            passed = chunk.pass_by(self._settings.skips) if self._settings.skips else []
            if not tracker.try_claim(Claim(chunk.positions)):
                consumer.unread(messages)
                return
            consumer.moved(chunk.positions)
            if passed:
                self._metrics.count_skipped(passed)
            if chunk.records:
                consumer.queries.note_answer()
                claimed_at = time.monotonic()
                yield from self._outputs(chunk, watermark, now_micros)
                consumer.adapt(chunk.records, time.monotonic() - claimed_at)
                emitted += chunk.records
            self._handle_failures(chunk, consumer, tracker)
            if not messages or (group.is_open and len(chunk.positions) < len(group.spans)):
                self._check_idle(consumer, tracker, watermark)
            lasted = time.monotonic() - began
            if emitted and (not messages or lasted >= _BUSY_BUNDLE_S or emitted >= _RECORDS_PER_BUNDLE):
                return  # What is emitted is seen by others when the bundle has ended.
            if not emitted and lasted >= _IDLE_BUNDLE_S:
                return

    def _outputs(self, chunk: Chunk, watermark: GroupWatermark, now_micros: int) -> Iterator[Any]:
        """Emit the records of a chunk, then move the watermarks of their partitions."""
        emitter = self._settings.emitter
        policy = emitter.timestamps
        outputs = Outputs()
        unreadable = 0
        moves: list[tuple[Partition, int]] = []
        for partition, records in chunk.runs:
            if records:
                tally = Tally()
                outputs.add(records, emitter.emit(records, now_micros, tally))
                unreadable += tally.unreadable
                if tally.newest > _NOTHING:
                    moves.append((partition, policy.watermark_after(tally.newest, now_micros)))
        # Each of the outputs has its own time. Theirs as a whole must not be late.
        yield windowed_value.create(outputs, watermark.current_watermark().micros, _GLOBAL)
        for partition, micros in moves:
            watermark.move(partition, micros)
        timestamps = (record.timestamp for _, records in chunk.runs for record in records)
        self._metrics.note(timestamps, chunk.bytes, now_micros // 1000)
        if unreadable:
            self._metrics.count_unreadable(unreadable)

    def _extend(self, consumer: GroupConsumer, element: int, tracker: Any, watermark: GroupWatermark) -> None:
        """Add new partitions to a stream's group now and then; end the group when the time to stop has come."""
        settings = self._settings
        group: PartitionGroup = tracker.current_restriction()
        if not group.is_open:
            return
        if settings.stop is not None and not self._stops_later():
            partitions = list(group.spans)
            stops = consumer.queries.resolve(settings.stop, partitions, name="stop")
            tracker.try_claim(Claim(stops=stops))
            return
        now = time.time()
        if 0 <= now - group.looked_at < settings.look_every_s or not tracker.try_claim(Claim(looked_at=now)):
            return
        found = consumer.queries.partitions_now(settings.topics, settings.pattern) or []
        new = [p for p in found if p not in group.spans and group_of(p, settings.groups) == element]
        if new:
            _LOGGER.info("%s: new partitions, read from their beginning", name_partitions(new))
            starts = consumer.queries.beginnings(new)
            if tracker.try_claim(Claim(found={partition: Span(at) for partition, at in starts.items()})):
                watermark.expect(new, watermark.current_watermark().micros)

    def _check_idle(self, consumer: GroupConsumer, tracker: Any, watermark: GroupWatermark) -> None:
        """Move the watermarks of partitions of which everything is read; notice brokers that are away."""
        now = time.monotonic()
        if now - consumer.checked_at < _CHECK_EVERY_S:
            return
        consumer.checked_at = now
        policy = self._settings.emitter.timestamps
        checked_micros = time.time_ns() // 1000
        spans = tracker.current_restriction().spans
        if not spans:
            watermark.move_empty(policy.watermark_when_idle(checked_micros))
            return
        ends = consumer.queries.ends_now(spans)
        if ends is None:
            return
        tracker.try_claim(Claim(ends=ends))
        fetched = consumer.known_ends()
        for partition, end in ends.items():
            # Records of an open transaction lie behind the end that `read_committed` sees. They will have old times.
            if partition in fetched and spans[partition].start >= max(end, fetched[partition]):
                watermark.move(partition, policy.watermark_when_idle(checked_micros))

    def _handle_failures(self, chunk: Chunk, consumer: GroupConsumer, tracker: Any) -> None:
        """Handle what partitions report instead of records: go on, skip what is lost, or raise."""
        failing = consumer.failing_since
        if failing:
            failed = {(message.topic(), message.partition()) for message in chunk.failed}
            for partition, _ in chunk.runs:  # It has records, or its end is reached.
                if partition not in failed:
                    failing.pop(partition, None)
            if failing and failed:
                time.sleep(_POLL_S)  # It fails again: the broker and the other partitions need a rest.
        if not chunk.failed:
            return
        consumer.restart()
        kafka = require("confluent_kafka", "kafka").KafkaError
        for message in chunk.failed:
            error = message.error()
            partition: Partition = message.topic(), message.partition()
            if error.code() in (kafka._AUTO_OFFSET_RESET, kafka.OFFSET_OUT_OF_RANGE):
                self._handle_lost(partition, consumer, tracker)
                continue
            now = time.monotonic()
            failed_for = now - failing.setdefault(partition, now)
            refused = error.code() in (kafka.TOPIC_AUTHORIZATION_FAILED, kafka.GROUP_AUTHORIZATION_FAILED)
            if error.fatal() or refused or failed_for > self._settings.consumers.max_outage_s:
                at = tracker.current_restriction().spans[partition].start
                raise KafkaError(
                    f"{name_partitions([partition])} can't be read from offset {at} on: {describe(error)}",
                    fix="check the rights of this client, and that the topic still exists",
                )
            _LOGGER.debug("%s: %s; reading goes on", name_partitions([partition]), describe(error))

    def _handle_lost(self, partition: Partition, consumer: GroupConsumer, tracker: Any) -> None:
        """Skip offsets that the broker no longer has, or raise with the numbers."""
        span: Span = tracker.current_restriction().spans[partition]
        first = consumer.queries.beginnings([partition])[partition]
        end = consumer.queries.ends([partition])[partition]
        if first <= span.start <= end:
            return  # It is there after all: a leader had not caught up.
        name = name_partitions([partition])
        if span.start > end:
            raise _beyond_end(partition, span.start, end)
        lost = f"{name} begins at offset {first}, but offset {span.start} was to be read: {first - span.start} offsets"
        if not self._settings.skips_lost:
            raise KafkaError(
                f"{lost} were removed by the topic's retention",
                fix="pass on_lost='skip' to go on at the first record that is left, or a later start=",
            )
        to = first if span.stop is None else min(first, span.stop)
        if tracker.try_claim(Claim({partition: to})):
            _LOGGER.warning("%s were removed by the topic's retention and are skipped", lost)
            self._metrics.count_lost(to - span.start)


class ReadStream(ReadGroup):
    """Reads a group of partitions without an end, and finds new ones."""

    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        element: int,
        finalizer: Any = beam.DoFn.BundleFinalizerParam,  # first: Beam passes it by position, the others by name
        tracker: Any = _GROUP,
        watermark: Any = _WATERMARK,
    ) -> Iterator[Any]:
        """Emit records as they come."""
        yield from super().process(element, finalizer, tracker, watermark)


def _beyond_end(partition: Partition, start: int, end: int) -> KafkaError:
    name = name_partitions([partition])
    return KafkaError(
        f"{name} ends at offset {end}, but offset {start} was to be read: it was truncated or is new",
        fix="choose another start=",
    )


def check_brokers(settings: ReadSettings, patience_s: float) -> None:
    """Raise if the brokers refuse this client, lack a topic, or don't answer for so long.

    Call it where the pipeline is built, if its workers run on this machine.
    """
    consumer = settings.consumers.open(patience_s)
    try:
        found = consumer.queries.check()
        partitions_of(found, settings.topics, settings.pattern, settings.consumers.client.servers)
    finally:
        consumer.close()
