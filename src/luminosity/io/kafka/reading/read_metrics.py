"""The metrics of a read: records, bytes, lag and age."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apache_beam.metrics import Metrics

from luminosity.io.kafka.reading.positions import Partition

__all__ = ["ReadMetrics"]

_NAMESPACE = "ReadKafka"
_PARTITIONS = 1_000  # that have a gauge of their own; more would make every report of a bundle long


class ReadMetrics:
    """Counts records, bytes and dead letters, and tells how far behind the reader is."""

    def __init__(self) -> None:
        self._records = Metrics.counter(_NAMESPACE, "records_read")
        self._bytes = Metrics.counter(_NAMESPACE, "bytes_read")
        self._unreadable = Metrics.counter(_NAMESPACE, "records_unreadable")
        self._lost = Metrics.counter(_NAMESPACE, "records_lost")
        self._age = Metrics.distribution(_NAMESPACE, "age_ms")
        self._lags: dict[Partition, Any] = {}

    def count(self, records: int, size: int, unreadable: int, oldest_age_ms: int) -> None:
        """Count the records of one claim; ``oldest_age_ms`` is the time since the timestamp of the oldest of them."""
        self._records.inc(records)
        self._bytes.inc(size)
        if unreadable:
            self._unreadable.inc(unreadable)
        self._age.update(oldest_age_ms)

    def count_lost(self, offsets: int) -> None:
        """Count offsets that retention has removed before they were read."""
        self._lost.inc(offsets)

    def set_lags(self, positions: Mapping[Partition, int], ends: Mapping[Partition, int]) -> None:
        """Report for each partition how many offsets are left to read."""
        for partition, end in ends.items():
            if partition not in positions:
                continue
            gauge = self._lags.get(partition)
            if gauge is None:
                if len(self._lags) >= _PARTITIONS:
                    continue
                gauge = self._lags[partition] = Metrics.gauge(_NAMESPACE, f"lag {partition[0]}[{partition[1]}]")
            gauge.set(max(0, end - positions[partition]))
