"""A Kafka whose partitions a test writes down: gaps in offsets, markers, retention, new topics, errors.

The mock broker can't do these. `ScriptedClient` takes the place of `KafkaClient`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import confluent_kafka
from apache_beam.io.watermark_estimators import WatermarkEstimator
from apache_beam.runners.sdf_utils import (
    RestrictionTrackerView,
    ThreadsafeRestrictionTracker,
    ThreadsafeWatermarkEstimator,
)

from luminosity.io.kafka.reading.consumer import ConsumerSettings
from luminosity.io.kafka.reading.deserialize import deserializer
from luminosity.io.kafka.reading.emit import Emitter
from luminosity.io.kafka.reading.positions import parse_start, parse_stop
from luminosity.io.kafka.reading.read_step import ReadGroup, ReadSettings, ReadStream
from luminosity.io.kafka.reading.timestamps import GroupWatermarks, TimestampPolicy

EOF = confluent_kafka.KafkaError._PARTITION_EOF
LOST = confluent_kafka.KafkaError._AUTO_OFFSET_RESET


class Message:
    def __init__(self, topic: str, partition: int, offset: int, *, error: Any = None, **fields: Any) -> None:
        self._at = topic, partition, offset
        self._error = error
        self._fields = fields

    def topic(self) -> str:
        return self._at[0]

    def partition(self) -> int:
        return self._at[1]

    def offset(self) -> int:
        return self._at[2]

    def error(self) -> Any:
        return self._error

    def timestamp(self) -> tuple[int, int]:
        return self._fields.get("timestamp", (1, 1_700_000_000_000 + self._at[2]))

    def key(self) -> bytes | None:
        return self._fields.get("key", b"k")

    def value(self) -> bytes | None:
        return self._fields.get("value", b"v%d" % self._at[2])

    def headers(self) -> Any:
        return self._fields.get("headers")


class Log:
    """One partition: records by offset, the first offset that is left, and the end, which may follow a gap."""

    def __init__(self, offsets: Iterable[int] = (), end: int | None = None, first: int = 0, **fields: Any) -> None:
        self.fields = fields
        self.offsets = sorted(offsets)
        self.first = first
        self.end = (self.offsets[-1] + 1 if self.offsets else first) if end is None else end


class ScriptedClient:
    """Partitions by topic and number. `times` answers questions for offsets by time; `failures` are errors."""

    servers = "scripted:9092"

    def __init__(self, logs: Mapping[tuple[str, int], Log]) -> None:
        self.logs = dict(logs)
        self.times: Callable[[tuple[str, int], int], int] = lambda partition, time_ms: -1
        self.committed: dict[tuple[str, int], int] = {}
        self.failures: list[tuple[str, int, int]] = []
        self.is_away = False
        self.refusal: int | None = None
        self.opened = self.closed = self.assigned = self.metadata = 0

    def has(self, name: str) -> bool:
        return False

    def consumer(self, settings: Mapping[str, Any], on_error: Any) -> Any:
        self.opened += 1
        self.settings = dict(settings)
        self.on_error = on_error
        return ScriptedConsumer(self)


class ScriptedConsumer:
    def __init__(self, client: ScriptedClient) -> None:
        self._client = client
        self._at: dict[tuple[str, int], int] = {}
        self._told: dict[tuple[str, int], int] = {}

    def _answer(self) -> None:
        if self._client.is_away:
            raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._TRANSPORT))

    def list_topics(self, topic: str | None = None, timeout: float = 0) -> Any:
        self._answer()
        self._client.metadata += 1
        names = {name for name, _ in self._client.logs if topic in (None, name)}
        numbers = {name: {number: None for each, number in self._client.logs if each == name} for name in names}
        return SimpleNamespace(
            topics={name: SimpleNamespace(partitions=found, error=None) for name, found in numbers.items()}
        )

    def offsets_for_times(self, partitions: list[Any], timeout: float = 0) -> list[Any]:
        self._answer()
        return [self._offset(each.topic, each.partition, each.offset) for each in partitions]

    def _offset(self, topic: str, number: int, when: int) -> Any:
        log = self._client.logs[topic, number]
        if when == -1:
            return confluent_kafka.TopicPartition(topic, number, log.end)
        if when == -2:
            return confluent_kafka.TopicPartition(topic, number, log.first)
        return confluent_kafka.TopicPartition(topic, number, self._client.times((topic, number), when))

    def committed(self, partitions: list[Any], timeout: float = 0) -> list[Any]:
        known = self._client.committed
        return [
            confluent_kafka.TopicPartition(p.topic, p.partition, known.get((p.topic, p.partition), -1001))
            for p in partitions
        ]

    def assign(self, partitions: list[Any]) -> None:
        self._client.assigned += 1
        self._at = {(p.topic, p.partition): p.offset for p in partitions}
        self._told = {}

    def poll(self, timeout: float = 0) -> Any:
        found = self.consume(1, timeout)
        return found[0] if found else None

    def consume(self, count: int, timeout: float = 0) -> list[Any]:
        if self._client.is_away:
            if self._client.refusal is not None:
                self._client.on_error(confluent_kafka.KafkaError(self._client.refusal))
            return []
        found: list[Any] = []
        while self._client.failures and len(found) < count:
            topic, number, code = self._client.failures.pop()
            found.append(Message(topic, number, -1, error=confluent_kafka.KafkaError(code)))
        for (topic, number), at in self._at.items():
            log = self._client.logs[topic, number]
            if at < log.first or at > log.end:
                error = confluent_kafka.KafkaError(LOST)
                if self._told.get((topic, number)) != at and len(found) < count:
                    self._told[topic, number] = at
                    found.append(Message(topic, number, at, error=error))
                continue
            for offset in log.offsets:
                if offset >= at and len(found) < count:
                    found.append(Message(topic, number, offset, **log.fields))
                    self._at[topic, number] = offset + 1
            left = [offset for offset in log.offsets if offset >= self._at[topic, number]]
            if not left and self._told.get((topic, number)) != log.end and len(found) < count:
                self._told[topic, number] = log.end
                found.append(Message(topic, number, log.end, error=confluent_kafka.KafkaError(EOF)))
        return found

    def get_watermark_offsets(self, partition: Any, cached: bool = False) -> tuple[int, int]:
        log = self._client.logs[partition.topic, partition.partition]
        return log.first, log.end

    def commit(self, offsets: list[Any], asynchronous: bool) -> None:
        for each in offsets:
            self._client.committed[each.topic, each.partition] = each.offset

    def close(self) -> None:
        self._client.closed += 1


class Callbacks(list[Callable[[], None]]):
    """Stands for Beam's bundle finalizer."""

    def register(self, callback: Callable[[], None]) -> None:
        self.append(callback)


class Bundle:
    """What one bundle of a step did: its outputs, the rest, and the watermark."""

    def __init__(self, step: ReadGroup, group: Any, state: Any = None, element: int = 0, meanwhile: Any = None) -> None:
        provider = GroupWatermarks()
        state = provider.initial_estimator_state(element, group) if state is None else state
        self.tracker = ThreadsafeRestrictionTracker(step.create_tracker(group))
        estimator: WatermarkEstimator = provider.create_watermark_estimator(state)
        watermark = ThreadsafeWatermarkEstimator(estimator)
        self.callbacks = Callbacks()
        self.outputs: list[Any] = []
        view = RestrictionTrackerView(self.tracker)
        for output in step.process(element, self.callbacks, view, watermark):
            self.outputs.append(output)
            if meanwhile is not None:
                meanwhile(self)
        self.tracker.check_done()
        deferred = self.tracker.deferred_status()
        self.rest = deferred[0] if deferred else None
        self.state = watermark.get_estimator_state()
        self.watermark = watermark.current_watermark()

    @property
    def offsets(self) -> list[tuple[str, int, int]]:
        records = [output.value for output in self.outputs]
        return [(record.topic, record.partition, record.offset) for record in records]


def step_of(
    client: Any,
    topics: list[str] | None = None,
    *,
    pattern: str | None = None,
    start: Any = "earliest",
    stop: Any = None,
    groups: int = 1,
    look_every_s: float = 1e9,
    skips_lost: bool = False,
    group_id: str | None = None,
    timestamps: Any = "record",
    delay_s: float = 0.0,
    max_outage_s: float = 100.0,
    key: Any = "bytes",
    value: Any = "bytes",
    keeps_unreadable: bool = False,
) -> ReadGroup:
    """Return a step that reads from `client`; it is bounded if `stop` is given and not in the future."""
    listed = topics or ([] if pattern else ["t"])
    settings = ReadSettings(
        ConsumerSettings(client, group_id, "read_committed", max_outage_s, f"test-{id(client)}"),
        listed,
        pattern,
        parse_start(start, listed),
        parse_stop(stop, listed),
        Emitter(TimestampPolicy.of(timestamps, delay_s), deserializer(key, value), keeps_unreadable=keeps_unreadable),
        groups,
        look_every_s,
        skips_lost,
    )
    return (ReadStream if stop is None else ReadGroup)(settings)
