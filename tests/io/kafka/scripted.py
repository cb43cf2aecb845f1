"""Runs bundles of the step behind ReadKafka without a pipeline, over a scripted Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from apache_beam.io.watermark_estimators import WatermarkEstimator
from apache_beam.runners.sdf_utils import (
    RestrictionTrackerView,
    ThreadsafeRestrictionTracker,
    ThreadsafeWatermarkEstimator,
)

from luminosity.io.kafka.consumer import ConsumerSettings
from luminosity.io.kafka.deserialize import deserializer
from luminosity.io.kafka.emit import Emitter, Unpack
from luminosity.io.kafka.progress import GroupWatermarks, TimestampPolicy
from luminosity.io.kafka.read import parse_start, parse_stop
from luminosity.io.kafka.read_step import ReadGroup, ReadSettings, ReadStream
from luminosity.testing import ScriptedKafka

FIRST_MS = 1_700_000_000_000  # the time of the record at offset 0; each offset is a millisecond later


class Log(NamedTuple):
    """The offsets of a partition's records, its end, which may follow a gap, and the first offset that is left."""

    offsets: Iterable[int] = ()
    end: int = 0
    first: int = 0
    value: str | None = None  # of all records, instead of one that has the offset


def script(kafka: ScriptedKafka, logs: dict[tuple[str, int], Log]) -> ScriptedKafka:
    """Write records down, behind those that are there already, and return the script."""
    for (topic, number), log in logs.items():
        kafka.create_topic(topic, number + 1)
        reached = log.first
        for n in sorted(log.offsets):
            value = f"v{n}" if log.value is None else log.value
            kafka.produce(topic, value, key="k", timestamp=FIRST_MS + n, partition=number, offset=n)
            reached = n + 1
        kafka.delete_records(topic, number, log.first)
        if log.end > reached:
            kafka.skip_offsets(topic, number, log.end - reached)
    return kafka


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
        self.emitted = 0  # elements of Beam, of which each has many outputs
        view = RestrictionTrackerView(self.tracker)
        for output in step.process(element, self.callbacks, view, watermark):
            self.emitted += 1
            self.outputs += Unpack().process(output.value)
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
    kafka: ScriptedKafka,
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
    """Return a step that reads from `kafka`; it is bounded if `stop` is given and not in the future."""
    listed = topics or ([] if pattern else ["t"])
    settings = ReadSettings(
        ConsumerSettings(kafka.client, group_id, "read_committed", max_outage_s, f"test-{id(kafka)}"),
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
