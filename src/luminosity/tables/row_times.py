"""The event times of rows, kept in a column, since an element with many rows has only one time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.transforms.window import GlobalWindows, TimestampedValue, WindowFn
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp

from luminosity.errors import Fix, InvalidType, TableError
from luminosity.tables.schemas import known_schema, remember_schema

__all__ = ["TIMESTAMP", "WindowTable", "times_of", "with_times"]

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


class WindowTable(beam.PTransform[Any, Any]):
    """Assigns the rows of a table to windows, each by its own event time: ``beam.WindowInto`` for record batches.

    An element has one time, and ``beam.WindowInto`` puts all its rows into the window of that time. This transform
    first splits record batches where windows meet, by the column ``_timestamp``, which ``ReadKafka(as_table=True)`` and
    ``TableFromRows(with_timestamps=True)`` have. So the windows of rows don't depend on how rows came in batches. A row
    whose time is null has the time of its batch.

    >>> from apache_beam.transforms.window import FixedWindows
    >>> times = pa.array([0, 59_000_000, 60_000_000], pa.timestamp("us", "UTC"))
    >>> batch = pa.record_batch({"n": [1, 2, 3], "_timestamp": times})
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     minutes = pipeline | beam.Create([batch]) | WindowTable(FixedWindows(60))
    ...     _ = minutes | beam.Map(lambda rows, window=beam.DoFn.WindowParam: print(window, rows["n"].to_pylist()))
    [0.0, 60.0) [1, 2]
    [60.0, 120.0) [3]

    Args:
        windowfn: the windows.
        kwargs: what ``beam.WindowInto`` takes: ``trigger``, ``accumulation_mode``, ``allowed_lateness``,
            ``timestamp_combiner``.
    """

    def __init__(self, windowfn: WindowFn, **kwargs: Any) -> None:
        super().__init__()
        if not isinstance(windowfn, WindowFn):  # pyright: ignore[reportUnnecessaryIsInstance]  # what users pass
            raise InvalidType(f"found {windowfn!r}, expected windows, such as FixedWindows(60)")
        self._windowfn = windowfn
        self._into = beam.WindowInto(windowfn, **kwargs)

    def expand(self, input_or_inputs: Any) -> Any:
        """Split the batches, and window the parts."""
        split = beam.ParDo(_SplitByWindow(self._windowfn)).with_output_types(pa.RecordBatch)
        table = input_or_inputs | "Split" >> split | "Window" >> self._into.with_output_types(pa.RecordBatch)
        schema = known_schema(input_or_inputs)
        return table if schema is None else remember_schema(table, schema)


class _SplitByWindow(beam.DoFn):
    """Splits a record batch into parts whose rows have the same windows; each has the time of its earliest row."""

    def __init__(self, windowfn: WindowFn) -> None:
        super().__init__()
        self._windowfn = windowfn

    def process(self, element: pa.RecordBatch, timestamp: Any = beam.DoFn.TimestampParam) -> Iterator[pa.RecordBatch]:
        """Yield the parts in the order of their first rows. A batch that needs no split is not copied."""
        times, _ = times_of(element, timestamp)
        if isinstance(self._windowfn, GlobalWindows) or len(set(times)) == 1:
            parts = [list(range(len(times)))] if times else []
        else:
            rows: dict[Any, list[int]] = {}
            windows: dict[Timestamp, Any] = {}
            for row, time in enumerate(times):
                if (found := windows.get(time)) is None:
                    found = windows[time] = tuple(self._windowfn.assign(WindowFn.AssignContext(time)))
                rows.setdefault(found, []).append(row)
            parts = list(rows.values())
        for part in parts:
            chosen = element if len(part) == len(times) else element.take(pa.array(part))
            yield TimestampedValue(chosen, min(times[row] for row in part))  # type: ignore[misc]
