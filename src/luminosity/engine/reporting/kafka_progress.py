"""The progress of steps that read or write Kafka: rates, lags, dead letters, and percentiles of times."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from luminosity._shared.kafka_metrics import KafkaMetrics, bucket_counts, percentile_ms
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.events import KafkaView, PartitionLag

__all__ = ["KafkaProgress"]

_NAMESPACES = frozenset({KafkaMetrics.READ, KafkaMetrics.WRITE})
_WINDOW_S = 60.0  # what "now" covers: long enough for a percentile, short enough to follow changes
_POINT_EVERY_S = 2.0  # bounds the number of points
_MOST_LAGS = 5  # partitions named in a snapshot


class _Point(NamedTuple):
    seconds: float  # since the run's start
    records: int
    bytes: int
    times: Mapping[int, int]  # counts by bucket


class KafkaProgress:
    """Tracks the steps of a stage that read or write Kafka. Only the loop's thread uses it."""

    def __init__(self, stage: str, metrics: RunMetrics) -> None:
        self._stage = stage
        self._metrics = metrics
        self._steps: dict[tuple[str, str], _Step] = {}

    def update(self, seconds: float) -> None:
        """Take the metrics that were committed up to ``seconds`` after the run's start."""
        for key, numbers in self._metrics.numbers(self._stage, _NAMESPACES).items():
            if key not in self._steps:
                self._steps[key] = _Step(*key)
            self._steps[key].reached(seconds, numbers)

    def views(self, seconds: float, *, is_last: bool = False) -> tuple[KafkaView, ...]:
        """Return a view for each step: of the last minute, or of the whole run if it is the last one."""
        return tuple(step.view(seconds, is_last) for _, step in sorted(self._steps.items()))


class _Step:
    def __init__(self, step: str, namespace: str) -> None:
        self._name = _label(step)
        self._is_read = namespace == KafkaMetrics.READ
        self._points: deque[_Point] = deque([_Point(0.0, 0, 0, {})])
        self._numbers: Mapping[str, int] = {}
        self._now = self._points[0]

    def reached(self, seconds: float, numbers: Mapping[str, int]) -> None:
        is_read = self._is_read
        self._numbers = numbers
        self._now = _Point(
            seconds,
            numbers.get(KafkaMetrics.RECORDS_READ if is_read else KafkaMetrics.RECORDS_WRITTEN, 0),
            numbers.get(KafkaMetrics.BYTES_READ if is_read else KafkaMetrics.BYTES_WRITTEN, 0),
            bucket_counts(numbers, KafkaMetrics.AGE if is_read else KafkaMetrics.LATENCY),
        )
        if seconds - self._points[-1].seconds >= _POINT_EVERY_S:
            self._points.append(self._now)

    def view(self, seconds: float, is_last: bool) -> KafkaView:
        now, numbers = self._now, self._numbers
        before = _Point(0.0, 0, 0, {}) if is_last else self._minute_ago(seconds)
        elapsed = max(1e-9, seconds - (before.seconds if is_last else max(before.seconds, seconds - _WINDOW_S)))
        times = {bucket: count - before.times.get(bucket, 0) for bucket, count in now.times.items()}
        start = KafkaMetrics.LAG
        lags = [PartitionLag(name.removeprefix(start), lag) for name, lag in numbers.items() if name.startswith(start)]
        lags.sort(key=lambda each: (-each.records, each.partition))
        letters = KafkaMetrics.RECORDS_UNREADABLE if self._is_read else KafkaMetrics.RECORDS_UNWRITTEN
        return KafkaView(
            self._name,
            "read" if self._is_read else "write",
            records=now.records,
            bytes=now.bytes,
            records_per_second=round((now.records - before.records) / elapsed, 2),
            bytes_per_second=round((now.bytes - before.bytes) / elapsed, 1),
            dead_letters=numbers.get(letters, 0),
            lost=numbers.get(KafkaMetrics.RECORDS_LOST, 0),
            p50_ms=percentile_ms(times, 0.5),
            p99_ms=percentile_ms(times, 0.99),
            lag=sum(each.records for each in lags),
            partitions=len(lags),
            lags=tuple(lags if is_last else [each for each in lags[:_MOST_LAGS] if each.records]),
        )

    def _minute_ago(self, seconds: float) -> _Point:
        """Return the last point before the minute, and forget those before it."""
        while len(self._points) > 1 and self._points[1].seconds <= seconds - _WINDOW_S:
            self._points.popleft()
        return self._points[0]


def _label(step: str) -> str:
    """Return the name that the transform has in the pipeline, without its inner steps.

    >>> _label("Live/Read reviews/Read/Process"), _label("Publish/Write")
    ('Live/Read reviews', 'Publish')
    """
    return step.removesuffix("/Process").removesuffix("/Read").removesuffix("/Write")
