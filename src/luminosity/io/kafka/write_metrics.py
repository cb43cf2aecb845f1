"""The metrics of a write: records, bytes, dead letters, and the time until Kafka has a record."""

from __future__ import annotations

import time
from array import array
from typing import Any

import numpy as np
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import MIN_TIMESTAMP

from luminosity._shared.kafka_metrics import KafkaMetrics, TimeCounters
from luminosity.tables.row_times import TIMESTAMP

__all__ = ["WriteMetrics"]

_MOST_TIMES = 1_000_000  # of one bundle: the rest is not measured, which takes 8 MB
_NO_TIME = MIN_TIMESTAMP.micros  # of an element that no source gave an event time
_END_OF_TIME = GlobalWindow().max_timestamp().micros


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
        place = batch.schema.get_field_index(TIMESTAMP)
        if place >= 0 and pa.types.is_timestamp(batch.schema.field(place).type):
            column = batch.column(place).drop_null().cast(pa.timestamp("us"), safe=False)
            times: Any = column.cast(pa.int64()).to_numpy()
        else:
            times = np.full(batch.num_rows, micros, np.int64)
        self._times.frombytes(times[: _MOST_TIMES - len(self._times)].tobytes())

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
