"""The event times of rows, kept in a column, since an element with many rows has only one time."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp

from luminosity.errors import Fix, TableError

__all__ = ["TIMESTAMP", "times_of", "with_times"]

TIMESTAMP = "_timestamp"
"""The column of the event times: microseconds, UTC; null if the row has no time."""

_TYPE = pa.timestamp("us", "UTC")


def with_times(batch: pa.RecordBatch, timestamps: list[Any]) -> pa.RecordBatch:
    """Return the batch with a column of these times."""
    if TIMESTAMP in batch.schema.names:
        raise TableError(
            f"found rows that have {TIMESTAMP!r}, and with_timestamps=True, which adds it",
            fix=Fix("drop the column, or leave out with_timestamps"),
        )
    micros = pa.array([None if time == MIN_TIMESTAMP else time.micros for time in timestamps], pa.int64())
    columns = [*batch.columns, micros.cast(_TYPE)]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema.append(pa.field(TIMESTAMP, _TYPE)))


def times_of(batch: pa.RecordBatch, timestamp: Any) -> tuple[list[Any], pa.RecordBatch]:
    """Return the times of the rows, and the other columns; ``timestamp`` is for rows without a time."""
    if TIMESTAMP not in batch.schema.names:
        raise TableError(
            f"found the columns {', '.join(batch.schema.names)}, expected {TIMESTAMP!r} for with_timestamps=True",
            fix=Fix("pass with_timestamps=True to TableFromRows, which adds the column"),
        )
    micros = batch.column(TIMESTAMP).cast(_TYPE).cast(pa.int64())
    times = [timestamp if time is None else Timestamp(micros=time) for time in micros.to_pylist()]
    return times, batch.select([name for name in batch.schema.names if name != TIMESTAMP])
