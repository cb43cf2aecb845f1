"""The metrics of ``ReadKafka`` and ``WriteKafka``: their names, and times that are counted in buckets.

A distribution of Beam has no percentiles, and its histograms stay in the worker. So times are counted in buckets, each
with a counter of its own, which every runner adds up. The transforms count, and the engine computes percentiles.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

__all__ = [
    "BUCKET_LIMITS_MS",
    "KafkaMetrics",
    "TimeCounters",
    "bucket_counts",
    "bucket_name",
    "bucket_names",
    "is_bucket",
    "percentile_ms",
]


class KafkaMetrics:
    """The namespaces and names of the metrics."""

    READ: Final = "ReadKafka"  # a namespace
    RECORDS_READ: Final = "records_read"
    BYTES_READ: Final = "bytes_read"
    RECORDS_UNREADABLE: Final = "records_unreadable"
    RECORDS_LOST: Final = "records_lost"
    RECORDS_SKIPPED: Final = "records_skipped"
    SKIPPED: Final = "skipped "  # how counters of single records that were left out begin
    AGE: Final = "age_ms"  # from a record's timestamp to its reading
    LAG: Final = "lag "  # how gauges of partitions begin: offsets that were left when the last bundle ended
    POSITION: Final = "position "  # the same, of the next offset to read

    WRITE: Final = "WriteKafka"  # a namespace
    RECORDS_WRITTEN: Final = "records_written"
    BYTES_WRITTEN: Final = "bytes_written"
    RECORDS_UNWRITTEN: Final = "records_unwritten"
    LATENCY: Final = "latency_ms"  # from the event time of an element to the moment when Kafka has its record


# Ten for each factor of ten, so that a percentile is off by at most 15%; whole milliseconds below 6.
_STEPS = (100, 125, 160, 200, 250, 315, 400, 500, 630, 800)
_MOST_MS = 10**13  # 317 years, so that the age of a record without a real timestamp is true, too
BUCKET_LIMITS_MS: tuple[int, ...] = (
    *(0, 1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, 50, 63, 80),
    *(step * 10**power for power in range(11) for step in _STEPS),
    _MOST_MS,
)
"""The greatest time in each bucket but the last, which has no limit."""

_LIMITS = np.array(BUCKET_LIMITS_MS, np.int64)
_TO = "_to_"  # between the name of a time and the limit of a bucket
_BEYOND = "more"  # the name of the last bucket


class TimeCounters:
    """Counts times in buckets, such as ``latency_ms_to_100`` for those above 80 ms and up to 100 ms.

    A counter is made when its bucket gets the first time: each one costs every bundle's report some microseconds.
    """

    def __init__(self, namespace: str, name: str) -> None:
        self._namespace = namespace
        self._name = name
        self._counters: dict[int, Any] = {}

    def count(self, times_ms: np.ndarray[Any, Any]) -> None:
        """Count times. One below zero, by a clock that is ahead, counts as zero."""
        counts = np.bincount(np.searchsorted(_LIMITS, times_ms))
        for bucket in np.flatnonzero(counts).tolist():
            self._add(bucket, int(counts[bucket]))

    def _add(self, bucket: int, count: int) -> None:
        counter = self._counters.get(bucket)
        if counter is None:
            # Where something is counted, Beam is loaded; commands that only read records start faster without it.
            from apache_beam.metrics import Metrics

            counter = self._counters[bucket] = Metrics.counter(self._namespace, _bucket_named(self._name, bucket))
        counter.inc(count)


def is_bucket(namespace: str, name: str) -> bool:
    """Return whether a metric is the counter of a bucket.

    >>> is_bucket("WriteKafka", "latency_ms_to_100"), is_bucket("WriteKafka", "latency_ms")
    (True, False)
    """
    times = {KafkaMetrics.READ: KafkaMetrics.AGE, KafkaMetrics.WRITE: KafkaMetrics.LATENCY}
    return namespace in times and name.startswith(times[namespace] + _TO)


def bucket_name(name: str, time_ms: float) -> str:
    """Return the name of the counter of the bucket of a time.

    >>> bucket_name("latency_ms", 81.5), bucket_name("latency_ms", -1)
    ('latency_ms_to_100', 'latency_ms_to_0')
    """
    return _bucket_named(name, bisect_left(BUCKET_LIMITS_MS, time_ms))


def _bucket_named(name: str, bucket: int) -> str:
    return f"{name}{_TO}{BUCKET_LIMITS_MS[bucket] if bucket < len(BUCKET_LIMITS_MS) else _BEYOND}"


def bucket_names(name: str) -> frozenset[str]:
    """Return the names of the counters of all buckets of a time."""
    return frozenset(f"{name}{_TO}{limit}" for limit in (*BUCKET_LIMITS_MS, _BEYOND))


def bucket_counts(counters: Mapping[str, int], name: str) -> dict[int, int]:
    """Return the counts of the buckets of a time among the counters of a step.

    >>> bucket_counts({"latency_ms_to_3": 5, "latency_ms_to_more": 1, "records_written": 6}, "latency_ms")
    {3: 5, 129: 1}
    """
    found: dict[int, int] = {}
    for counter, count in counters.items():
        limit = counter.removeprefix(name + _TO) if counter.startswith(name + _TO) else ""
        if limit == _BEYOND:
            found[len(BUCKET_LIMITS_MS)] = count
        elif limit.isdigit():
            found[bisect_left(BUCKET_LIMITS_MS, int(limit))] = count
    return found


def percentile_ms(counts: Mapping[int, int], fraction: float) -> float | None:
    """Return the time that a fraction of all times does not exceed, within 15%; None if nothing was counted.

    >>> counts = {bisect_left(BUCKET_LIMITS_MS, 3): 98, bisect_left(BUCKET_LIMITS_MS, 100): 2}
    >>> percentile_ms(counts, 0.5), round(percentile_ms(counts, 0.99)), percentile_ms({}, 0.5)
    (3.0, 90, None)
    """
    total = sum(counts.values())
    if total <= 0:
        return None
    buckets = sorted(bucket for bucket, count in counts.items() if count > 0)
    reached = itertools.accumulate(counts[bucket] for bucket in buckets)
    bucket = next(bucket for bucket, count in zip(buckets, reached, strict=True) if count >= fraction * total - 1e-9)
    if bucket == 0:
        return 0.0
    if bucket >= len(BUCKET_LIMITS_MS):
        return float(_MOST_MS)
    least, most = BUCKET_LIMITS_MS[bucket - 1] + 1, BUCKET_LIMITS_MS[bucket]
    return float(f"{(least * most) ** 0.5:.3g}")  # As far from both, by their ratio.
