"""The metrics of a read: records, bytes, lag and age."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from apache_beam.metrics import Metrics

from luminosity._shared.kafka_metrics import KafkaMetrics, TimeCounters
from luminosity.io.kafka.reading.positions import Partition

__all__ = ["ReadMetrics"]

_PARTITIONS = 100  # that have a gauge of their own: each one costs every report of a bundle some 50 microseconds
_MOST_MS = 1 << 62  # a timestamp may have any 64 bits; differences of smaller ones have no overflow


class ReadMetrics:
    """Counts records, bytes and dead letters, and tells how far behind the reader is."""

    def __init__(self) -> None:
        namespace = KafkaMetrics.READ
        self._records = Metrics.counter(namespace, KafkaMetrics.RECORDS_READ)
        self._bytes = Metrics.counter(namespace, KafkaMetrics.BYTES_READ)
        self._unreadable = Metrics.counter(namespace, KafkaMetrics.RECORDS_UNREADABLE)
        self._lost = Metrics.counter(namespace, KafkaMetrics.RECORDS_LOST)
        self._age = Metrics.distribution(namespace, KafkaMetrics.AGE)
        self._ages = TimeCounters(namespace, KafkaMetrics.AGE)
        self._lags: dict[Partition, Any] = {}
        self._others: dict[int, Any] = {}  # by group

    def count(self, timestamps: Iterable[int], size: int, unreadable: int, now_ms: int) -> None:
        """Count the records of one claim, with their timestamps in milliseconds; -1 is none."""
        times = np.fromiter(timestamps, np.int64)
        self._records.inc(len(times))
        self._bytes.inc(size)
        if unreadable:
            self._unreadable.inc(unreadable)
        times = times[times >= 0]
        if len(times):
            ages = now_ms - np.minimum(times, _MOST_MS)
            self._ages.count(ages)
            self._age.update(max(0, int(ages.max())))

    def count_lost(self, offsets: int) -> None:
        """Count offsets that retention has removed before they were read."""
        self._lost.inc(offsets)

    def set_lags(self, group: int, positions: Mapping[Partition, int], ends: Mapping[Partition, int]) -> None:
        """Report for each partition of a group how many offsets are left to read.

        If there are many partitions, those that are far behind get a gauge of their own, and the others share one.
        """
        lags = {p: max(0, end - positions[p]) for p, end in ends.items() if p in positions}
        without = [partition for partition in lags if partition not in self._lags]
        if len(without) > _PARTITIONS - len(self._lags):
            without.sort(key=lags.__getitem__, reverse=True)
        for partition in without[: _PARTITIONS - len(self._lags)]:
            self._lags[partition] = _lag(f"{partition[0]}[{partition[1]}]")
        others = 0
        for partition, lag in lags.items():
            if partition in self._lags:
                self._lags[partition].set(lag)
            else:
                others += lag
        if len(self._lags) >= _PARTITIONS and len(lags) > 1:
            if group not in self._others:
                self._others[group] = _lag(f"of others in group {group}")
            self._others[group].set(others)


def _lag(name: str) -> Any:
    return Metrics.gauge(KafkaMetrics.READ, KafkaMetrics.LAG + name)
