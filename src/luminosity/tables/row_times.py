"""The event times of a table's rows, which are many in one element."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp

from luminosity.errors import TableError

__all__ = ["TIMESTAMP", "times_of", "with_times"]

TIMESTAMP = "_timestamp"
"""The column that holds them: microseconds, UTC; null: the row has none of its own."""

_TYPE = pa.timestamp("us", "UTC")


def with_times(batch: pa.RecordBatch, timestamps: list[Any]) -> pa.RecordBatch:
    if TIMESTAMP in batch.schema.names:
        raise TableError(f"found rows that have {TIMESTAMP!r} and with_timestamps=True, which adds it; leave one out")
    micros = pa.array([None if time == MIN_TIMESTAMP else time.micros for time in timestamps], pa.int64())
    columns = [*batch.columns, micros.cast(_TYPE)]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema.append(pa.field(TIMESTAMP, _TYPE)))


def times_of(batch: pa.RecordBatch, timestamp: Any) -> tuple[list[Any], pa.RecordBatch]:
    """The times of the rows, and the other columns."""
    if TIMESTAMP not in batch.schema.names:
        raise TableError(
            f"found the columns {', '.join(batch.schema.names)}, expected {TIMESTAMP!r} for with_timestamps=True; "
            "TableFromRows(with_timestamps=True) adds it"
        )
    micros = batch.column(TIMESTAMP).cast(_TYPE).cast(pa.int64())
    times = [timestamp if time is None else Timestamp(micros=time) for time in micros.to_pylist()]
    return times, batch.select([name for name in batch.schema.names if name != TIMESTAMP])
