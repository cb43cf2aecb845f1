"""The metrics of a read and of a write: records, bytes, lag, and how old records are."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import MIN_TIMESTAMP

from luminosity._shared.kafka_metrics import KafkaMetrics, TimeCounters
from luminosity.io.kafka.record import KafkaRecord, Partition
from luminosity.tables.row_times import TIMESTAMP

__all__ = ["ReadMetrics", "WriteMetrics", "row_micros"]

_LOGGER = logging.getLogger(__name__)

_PARTITIONS = 100  # that have a gauge of their own: each one costs every report of a bundle some 50 microseconds
_MOST_MS = 1 << 62  # a timestamp may have any 64 bits; differences of smaller ones have no overflow

_MOST_TIMES = 1_000_000  # of one bundle: the rest is not measured, which takes 8 MB
_NO_TIME = MIN_TIMESTAMP.micros  # of an element that no source gave an event time
_END_OF_TIME = GlobalWindow().max_timestamp().micros


class ReadMetrics:
    """Counts records, bytes and dead letters, and tells how far behind the reader is."""

    def __init__(self) -> None:
        namespace = KafkaMetrics.READ
        self._records = Metrics.counter(namespace, KafkaMetrics.RECORDS_READ)
        self._bytes = Metrics.counter(namespace, KafkaMetrics.BYTES_READ)
        self._unreadable = Metrics.counter(namespace, KafkaMetrics.RECORDS_UNREADABLE)
        self._lost = Metrics.counter(namespace, KafkaMetrics.RECORDS_LOST)
        self._skipped = Metrics.counter(namespace, KafkaMetrics.RECORDS_SKIPPED)
        self._age = Metrics.distribution(namespace, KafkaMetrics.AGE)
        self._ages = TimeCounters(namespace, KafkaMetrics.AGE)
        self._lags: dict[Partition, Any] = {}
        self._positions: dict[Partition, Any] = {}
        self._others: dict[int, Any] = {}  # by group
        self.start()

    def start(self) -> None:
        """Forget what was noted and not counted: its bundle has failed."""
        self._times = array("q")
        self._claims: list[tuple[int, int]] = []  # of each, how many records it has, and the time when they were read
        self._size = 0

    def note(self, timestamps: Iterable[int], size: int, now_ms: int) -> None:
        """Note the records of one claim, with their timestamps in milliseconds; -1 is none."""
        before = len(self._times)
        self._times.extend(timestamps)
        self._claims.append((len(self._times) - before, now_ms))
        self._size += size

    def count(self) -> None:
        """Count what was noted: once for many claims, since a claim may have few records."""
        if not self._claims:
            return
        times = np.array(self._times, np.int64)
        self._records.inc(len(times))
        self._bytes.inc(self._size)
        counts, read_at = np.array(self._claims, np.int64).T
        has_time = times >= 0
        if has_time.any():
            ages = (np.repeat(read_at, counts) - np.minimum(times, _MOST_MS))[has_time]
            self._ages.count(ages)
            self._age.update(max(0, int(ages.max())))
        self.start()

    def count_unreadable(self, records: int) -> None:
        """Count dead letters."""
        self._unreadable.inc(records)

    def count_lost(self, offsets: int) -> None:
        """Count offsets that retention has removed before they were read."""
        self._lost.inc(offsets)

    def count_skipped(self, records: Iterable[KafkaRecord]) -> None:
        """Count records that ``--skip_record`` has left out, each by its place."""
        for record in records:
            self._skipped.inc()
            place = f"{record.topic}[{record.partition}]@{record.offset}"
            Metrics.counter(KafkaMetrics.READ, KafkaMetrics.SKIPPED + place).inc()
            _LOGGER.warning("the record %s is left out, as --skip_record says", place)

    def set_lags(self, group: int, positions: Mapping[Partition, int], ends: Mapping[Partition, int]) -> None:
        """Report for each partition of a group how many offsets are left to read.

        If there are many partitions, those that are far behind get a gauge of their own, and the others share one.
        """
        lags = {p: max(0, end - positions[p]) for p, end in ends.items() if p in positions}
        without = [partition for partition in lags if partition not in self._lags]
        if len(without) > _PARTITIONS - len(self._lags):
            without.sort(key=lags.__getitem__, reverse=True)
        for partition in without[: _PARTITIONS - len(self._lags)]:
            name = f"{partition[0]}[{partition[1]}]"
            self._lags[partition] = _lag(name)
            self._positions[partition] = Metrics.gauge(KafkaMetrics.READ, KafkaMetrics.POSITION + name)
        others = 0
        for partition, lag in lags.items():
            if partition in self._lags:
                self._lags[partition].set(lag)
                self._positions[partition].set(positions[partition])
            else:
                others += lag
        if len(self._lags) >= _PARTITIONS and len(lags) > 1:
            if group not in self._others:
                self._others[group] = _lag(f"of others in group {group}")
            self._others[group].set(others)


def _lag(name: str) -> Any:
    return Metrics.gauge(KafkaMetrics.READ, KafkaMetrics.LAG + name)


class WriteMetrics:
    """Counts what Kafka has of each bundle, and how long after its event time.

    Kafka confirms the records of a bundle when it ends, so that is when the time is taken.
    """

    def __init__(self) -> None:
        namespace = KafkaMetrics.WRITE
        self._written = Metrics.counter(namespace, KafkaMetrics.RECORDS_WRITTEN)
        self._bytes = Metrics.counter(namespace, KafkaMetrics.BYTES_WRITTEN)
        self._unwritten = Metrics.counter(namespace, KafkaMetrics.RECORDS_UNWRITTEN)
        self._latency = Metrics.distribution(namespace, KafkaMetrics.LATENCY)
        self._latencies = TimeCounters(namespace, KafkaMetrics.LATENCY)
        self._times = array("q")

    def start(self) -> None:
        """Forget the elements of the bundle before."""
        self._times = array("q")

    def note(self, micros: int) -> None:
        """Note the event time of an element that is sent."""
        if len(self._times) < _MOST_TIMES:
            self._times.append(micros)

    def note_rows(self, batch: pa.RecordBatch, micros: int) -> None:
        """Note the event times of the rows of a table: their own, or that of the element."""
        times = row_micros(batch, micros)
        self._times.frombytes(times[: _MOST_TIMES - len(self._times)].tobytes())

    def note_many(self, times: bytes) -> None:
        """Note event times, each of 64 bits."""
        self._times.frombytes(times[: 8 * (_MOST_TIMES - len(self._times))])

    def count(self, written: int, size: int, unwritten: int) -> None:
        """Count the records of a bundle. Call it when Kafka has them."""
        self._written.inc(written)
        self._bytes.inc(size)
        self._unwritten.inc(unwritten)
        times: Any = np.array(self._times, np.int64)
        times = times[(times > _NO_TIME) & (times < _END_OF_TIME)]
        if len(times):
            latencies = (time.time_ns() // 1000 - times) // 1000
            self._latencies.count(latencies)
            self._latency.update(max(0, int(latencies.max())))
        self.start()


def row_micros(batch: pa.RecordBatch, micros: int) -> Any:
    """Return an array with the event times of the rows of a table: their own, or else that of the element."""
    place = batch.schema.get_field_index(TIMESTAMP)
    if place >= 0 and pa.types.is_timestamp(batch.schema.field(place).type):
        column = batch.column(place).cast(pa.timestamp("us"), safe=False)
        return column.cast(pa.int64()).fill_null(_NO_TIME).to_numpy()
    return np.full(batch.num_rows, micros, np.int64)
