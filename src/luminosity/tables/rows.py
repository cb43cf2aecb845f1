"""Rows into tables and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.transforms.window import TimestampedValue, WindowedValue
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp

from luminosity.tables.building import BatchBuilder
from luminosity.tables.reading import RowMaker
from luminosity.tables.sizes import bytes_of_rows, pieces
from luminosity.tables.types import row_hint, to_schema

__all__ = ["TIMESTAMP", "RowsFromTable", "TableFromRows"]

TIMESTAMP = "_timestamp"
"""The column that holds the times of rows: microseconds, UTC; null: the row has none of its own."""

_TIMESTAMP_TYPE = pa.timestamp("us", "UTC")
_MANY_WINDOWS = 1000


class TableFromRows(beam.PTransform[Any, Any]):
    """Rows into a table: dicts, Beam Rows, NamedTuples or dataclasses into `pyarrow.RecordBatch`es.

    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     rows = pipeline | beam.Create([{"text": "fine", "stars": 5}, {"text": "no"}])
    ...     table = rows | TableFromRows(pa.schema([("text", pa.string()), ("stars", pa.int8())]))
    ...     _ = table | beam.Map(lambda batch: print(batch.to_pydict()))
    {'text': ['fine', 'no'], 'stars': [5, None]}

    A batch never crosses a window or a bundle, and its time is the earliest of its rows'.

    Args:
        schema: the columns: a `pyarrow.Schema`, or a dataclass, NamedTuple or TypedDict class. What is missing in a row is null;
            a row that has more is an error. Without it, the type of the rows tells, if Beam knows it; else every
            worker learns the columns from its first rows, and later rows that differ are an error.
        rows_per_batch: a batch has no more rows.
        bytes_per_batch: nor, but for a single large row, about more bytes.
        with_timestamps: keep the time of every row in the column `_timestamp`; `RowsFromTable` gives it back.
    """

    def __init__(
        self,
        schema: Any = None,
        *,
        rows_per_batch: int = 10_000,
        bytes_per_batch: int = 16_000_000,
        with_timestamps: bool = False,
    ) -> None:
        super().__init__()
        self._schema = to_schema(schema)
        for name, value in (("rows_per_batch", rows_per_batch), ("bytes_per_batch", bytes_per_batch)):
            if value < 1:
                raise ValueError(f"found {name}={value}, expected 1 or more")
        if with_timestamps and self._schema is not None and TIMESTAMP in self._schema.names:
            raise ValueError(f"found {TIMESTAMP!r} in the schema and with_timestamps=True, which adds it; leave one out")
        self._limits = rows_per_batch, bytes_per_batch
        self._with_timestamps = with_timestamps

    def expand(self, pcoll: Any) -> Any:  # type: ignore[override]
        builder = BatchBuilder(self._schema, pcoll.element_type)
        gather = _GatherDoFn(builder, *self._limits, self._with_timestamps)
        return pcoll | "Gather" >> beam.ParDo(gather).with_output_types(pa.RecordBatch)


class RowsFromTable(beam.PTransform[Any, Any]):
    """A table into rows, in the order in which they are in each batch.

    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     table = pipeline | beam.Create([pa.record_batch({"text": ["fine", "no"], "stars": [5, None]})])
    ...     _ = table | RowsFromTable() | beam.Map(print)
    {'text': 'fine', 'stars': 5}
    {'text': 'no', 'stars': None}

    Vectors come as lists of floats, structs and maps as dicts, times as datetimes.

    Args:
        as_: `dict`, `beam.Row`, or a dataclass or NamedTuple class, which takes the columns that it has fields for.
        schema: with `beam.Row`: the columns, so that Beam's schema-aware transforms (SQL, JDBC, other languages) know
            them before the pipeline runs. Batches are cast to it. A class says them by itself.
        with_timestamps: give rows the times in the column `_timestamp`, which is then left out.
    """

    def __init__(self, as_: Any = dict, *, schema: Any = None, with_timestamps: bool = False) -> None:
        super().__init__()
        self._maker = RowMaker(as_, to_schema(schema))
        self._with_timestamps = with_timestamps
        known = self._maker.schema
        self._hint = dict[str, Any] if as_ is dict else row_hint(known) if known is not None else as_

    def expand(self, pcoll: Any) -> Any:  # type: ignore[override]
        scatter = _ScatterDoFn(self._maker, self._with_timestamps)
        return pcoll | "Scatter" >> beam.ParDo(scatter).with_output_types(self._hint)


class _GatherDoFn(beam.DoFn):
    def __init__(self, builder: BatchBuilder, most_rows: int, most_bytes: int, with_timestamps: bool) -> None:
        self._builder = builder
        self._most_rows = most_rows
        self._most_bytes = most_bytes
        self._with_timestamps = with_timestamps
        self._gathered: dict[Any, _Gathered] = {}

    def start_bundle(self) -> None:
        self._gathered = {}

    def get_input_batch_type(self, input_element_type: Any) -> Any:
        return list[input_element_type]

    @beam.DoFn.yields_elements
    def process_batch(  # type: ignore[override]  # Beam gives elements of one time and window at once: a tenth of the cost.
        self, batch: list[Any], timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        for rows, size in pieces(batch, bytes_of_rows(batch), self._most_rows, self._most_bytes):
            gathered = self._gathered.setdefault(window, _Gathered())
            if gathered.rows and (
                len(gathered.rows) + len(rows) > self._most_rows or gathered.size + size > self._most_bytes
            ):
                yield from self._emit(window, gathered)
                gathered = self._gathered[window] = _Gathered()
            gathered.add(rows, timestamp, size)
        everything = self._gathered.values()
        if len(everything) > _MANY_WINDOWS or (
            len(everything) > 1 and sum(gathered.size for gathered in everything) > self._most_bytes
        ):
            yield from self.finish_bundle()

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam's says None, and takes these.
        for window, gathered in self._gathered.items():
            yield from self._emit(window, gathered)
        self._gathered = {}

    def _emit(self, window: Any, gathered: _Gathered) -> Iterator[WindowedValue]:
        for start, batch in self._built(gathered.rows, 0):
            timestamps = gathered.timestamps[start : start + batch.num_rows]
            if self._with_timestamps:
                batch = _with_times(batch, timestamps)
            # Most are one and the same object, and comparing them is slow.
            earliest = min({id(timestamp): timestamp for timestamp in timestamps}.values())
            yield WindowedValue(batch, earliest, (window,))

    def _built(self, rows: list[Any], start: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches, and the place of the first row of each. Sizes were estimated: now they are known."""
        try:
            batch = self._builder.build(rows)
        except OverflowError:
            if len(rows) == 1:
                raise
            middle = len(rows) // 2
            yield from self._built(rows[:middle], start)
            yield from self._built(rows[middle:], start + middle)
            return
        count = max(1, len(rows) * self._most_bytes // max(batch.nbytes, 1))
        for offset in range(0, len(rows), count):
            yield start + offset, batch.slice(offset, count)


class _Gathered:
    """Rows of one window that wait for more."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.timestamps: list[Any] = []
        self.size = 0

    def add(self, rows: list[Any], timestamp: Any, size: int) -> None:
        self.rows += rows
        self.timestamps += [timestamp] * len(rows)
        self.size += size


class _ScatterDoFn(beam.DoFn):
    def __init__(self, maker: RowMaker, with_timestamps: bool) -> None:
        self._maker = maker
        self._with_timestamps = with_timestamps

    def process(self, element: pa.RecordBatch, timestamp: Any = beam.DoFn.TimestampParam) -> Any:
        if not self._with_timestamps:
            return self._maker.rows(element)
        times, rest = _times(element, timestamp)
        rows = self._maker.rows(rest)
        return [TimestampedValue(row, time) for row, time in zip(rows, times, strict=True)]


def _with_times(batch: pa.RecordBatch, timestamps: list[Any]) -> pa.RecordBatch:
    if TIMESTAMP in batch.schema.names:
        raise ValueError(f"found rows that have {TIMESTAMP!r} and with_timestamps=True, which adds it; leave one out")
    micros = pa.array([None if time == MIN_TIMESTAMP else time.micros for time in timestamps], pa.int64())
    return batch.append_column(TIMESTAMP, micros.cast(_TIMESTAMP_TYPE))


def _times(batch: pa.RecordBatch, timestamp: Any) -> tuple[list[Any], pa.RecordBatch]:
    """The times of the rows, and the other columns."""
    if TIMESTAMP not in batch.schema.names:
        raise ValueError(
            f"found no column {TIMESTAMP!r} among {', '.join(batch.schema.names)}, expected one for with_timestamps=True; "
            "TableFromRows(with_timestamps=True) adds it"
        )
    micros = batch.column(TIMESTAMP).cast(_TIMESTAMP_TYPE).cast(pa.int64())
    times = [timestamp if time is None else Timestamp(micros=time) for time in micros.to_pylist()]
    return times, batch.select([name for name in batch.schema.names if name != TIMESTAMP])
