"""The transforms that gather rows into tables, and turn tables into rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.transforms.window import TimestampedValue, WindowedValue

from luminosity.errors import Fix, InvalidArgument, TableError
from luminosity.tables.batch_builder import BatchBuilder
from luminosity.tables.row_maker import RowMaker
from luminosity.tables.row_times import TIMESTAMP, times_of, with_times
from luminosity.tables.types import row_hint, to_schema

__all__ = ["GatherDoFn", "RowsFromTable", "TableFromRows"]


class TableFromRows(beam.PTransform[Any, Any]):
    """Turns dicts, Beam Rows, NamedTuples or dataclasses into a table of ``pyarrow.RecordBatch`` elements.

    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     rows = pipeline | beam.Create([{"text": "fine", "stars": 5}, {"text": "no"}])
    ...     table = rows | TableFromRows(pa.schema([("text", pa.string()), ("stars", pa.int8())]))
    ...     _ = table | beam.Map(lambda batch: print(batch.to_pydict()))
    {'text': ['fine', 'no'], 'stars': [5, None]}

    A batch has rows of one window and one bundle; its timestamp is the earliest of its rows.

    Args:
        schema: the columns, as a ``pyarrow.Schema`` or a dataclass, NamedTuple or TypedDict class. A value that a row
            lacks is null; a row with other columns is an error. Without a schema, the columns are those of the rows'
            type, if Beam knows it. Otherwise every worker infers them from its first rows, and later rows that do not
            fit are an error.
        rows_per_batch: the most rows of a batch.
        bytes_per_batch: about the most bytes of a batch, unless a single row is larger.
        with_timestamps: keep the timestamp of every row in the column ``_timestamp``, for ``RowsFromTable``.
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
                raise InvalidArgument(f"found {name}={value}, expected 1 or more")
        if with_timestamps and self._schema is not None and TIMESTAMP in self._schema.names:
            raise InvalidArgument(
                f"found {TIMESTAMP!r} in the schema, and with_timestamps=True, which adds it",
                fix=Fix("leave out one of them"),
            )
        self._limits = rows_per_batch, bytes_per_batch
        self._with_timestamps = with_timestamps

    def expand(self, pcoll: Any) -> Any:  # type: ignore[override]
        """Gather the rows of each bundle and window into record batches."""
        builder = BatchBuilder(self._schema, pcoll.element_type)
        gather = GatherDoFn(builder, *self._limits, self._with_timestamps)
        return pcoll | "Gather" >> beam.ParDo(gather).with_output_types(pa.RecordBatch)


class RowsFromTable(beam.PTransform[Any, Any]):
    """Turns a table into rows, in the order of each batch.

    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     table = pipeline | beam.Create([pa.record_batch({"text": ["fine", "no"], "stars": [5, None]})])
    ...     _ = table | RowsFromTable() | beam.Map(print)
    {'text': 'fine', 'stars': 5}
    {'text': 'no', 'stars': None}

    Vectors become lists of floats, structs and maps become dicts, times become datetimes.

    Args:
        as_: ``dict``, ``beam.Row``, or a dataclass or NamedTuple class, which gets the columns that it has fields for.
        schema: the columns, only with ``beam.Row``, so that Beam's schema-aware transforms (SQL, JDBC, other languages)
            know them before the pipeline runs. Batches are cast to it. Classes tell their columns themselves.
        with_timestamps: give rows the timestamps in the column ``_timestamp``, which is then left out.
    """

    def __init__(self, as_: Any = dict, *, schema: Any = None, with_timestamps: bool = False) -> None:
        super().__init__()
        self._maker = RowMaker(as_, to_schema(schema))
        self._with_timestamps = with_timestamps
        known = self._maker.schema
        self._hint = dict[str, Any] if as_ is dict else row_hint(known) if known is not None else as_

    def expand(self, pcoll: Any) -> Any:  # type: ignore[override]
        """Turn each record batch into its rows, with the type that ``as_`` names."""
        scatter = _ScatterDoFn(self._maker, self._with_timestamps)
        return pcoll | "Scatter" >> beam.ParDo(scatter).with_output_types(self._hint)


class _ScatterDoFn(beam.DoFn):
    def __init__(self, maker: RowMaker, with_timestamps: bool) -> None:
        self._maker = maker
        self._with_timestamps = with_timestamps

    def process(self, element: pa.RecordBatch, timestamp: Any = beam.DoFn.TimestampParam) -> Any:
        if not self._with_timestamps:
            return self._maker.rows(element)
        times, rest = times_of(element, timestamp)
        rows = self._maker.rows(rest)
        return [TimestampedValue(row, time) for row, time in zip(rows, times, strict=True)]


_MANY_WINDOWS = 1000  # at once in a bundle: bounds the memory of batches that wait
_SAMPLE = 64


class GatherDoFn(beam.DoFn):
    """Gathers rows into batches. A batch has rows of one window and one bundle."""

    def __init__(self, builder: BatchBuilder, most_rows: int, most_bytes: int, with_timestamps: bool) -> None:
        self._builder = builder
        self._most_rows = most_rows
        self._most_bytes = most_bytes
        self._with_timestamps = with_timestamps
        self._gathered: dict[Any, _Gathered] = {}

    def start_bundle(self) -> None:
        """Drop rows that a failed bundle left behind."""
        self._gathered = {}

    def get_input_batch_type(self, input_element_type: Any) -> Any:
        """Return a list of elements, so that Beam passes many rows at once."""
        return list[input_element_type]

    @beam.DoFn.yields_elements
    def process_batch(  # type: ignore[override]  # Beam passes elements of one time and window together: a tenth of the cost.
        self, batch: list[Any], timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        """Add rows to the batch of their window, and emit batches that are full."""
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

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam declares None, and accepts these.
        """Emit the batches of all windows."""
        for window, gathered in self._gathered.items():
            yield from self._emit(window, gathered)
        self._gathered = {}

    def _emit(self, window: Any, gathered: _Gathered) -> Iterator[WindowedValue]:
        for start, batch in self._built(gathered.rows, 0):
            timestamps = gathered.timestamps[start : start + batch.num_rows]
            if self._with_timestamps:
                batch = with_times(batch, timestamps)
            # Most timestamps are the same object, and comparing them is slow.
            earliest = min({id(timestamp): timestamp for timestamp in timestamps}.values())
            yield WindowedValue(batch, earliest, (window,))

    def _built(self, rows: list[Any], start: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches within the limits, with the index of their first row: only now their real size is known."""
        try:
            batch = self._builder.build(rows)
        except OverflowError as error:
            if len(rows) == 1:
                raise TableError(f"found a row with {error}") from error
            middle = len(rows) // 2
            yield from self._built(rows[:middle], start)
            yield from self._built(rows[middle:], start + middle)
            return
        is_near = batch.nbytes <= 2 * self._most_bytes
        count = len(rows) if is_near else max(1, len(rows) * self._most_bytes // batch.nbytes)
        for offset in range(0, len(rows), count):
            yield start + offset, batch.slice(offset, count)


class _Gathered:
    """The rows of one window that wait for more."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.timestamps: list[Any] = []
        self.size = 0

    def add(self, rows: list[Any], timestamp: Any, size: int) -> None:
        self.rows += rows
        self.timestamps += [timestamp] * len(rows)
        self.size += size


def bytes_of_rows(rows: list[Any]) -> int:
    """Estimate the bytes of rows from a sample of them.

    >>> bytes_of_rows([{"text": "four", "stars": 5}] * 1000)
    12000
    """
    some = rows[:: -(-len(rows) // _SAMPLE)] if len(rows) > _SAMPLE else rows
    return sum(map(_size, some)) * len(rows) // max(len(some), 1)


def pieces(rows: list[Any], size: int, most_rows: int, most_bytes: int) -> Iterator[tuple[list[Any], int]]:
    """Yield pieces of rows within both limits, with their sizes; ``size`` is that of all rows.

    >>> [(len(piece), size) for piece, size in pieces([{}] * 10, 1000, most_rows=4, most_bytes=10_000)]
    [(4, 400), (4, 400), (2, 200)]
    """
    count = max(1, min(most_rows, len(rows) * most_bytes // max(size, 1)))
    for start in range(0, len(rows), count):
        piece = rows[start : start + count]
        yield piece, size * len(piece) // len(rows)


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        # All items of a list have the same type.
        first = next(iter(value), None)
        return len(value) * _size(first) if isinstance(first, int | float) else sum(map(_size, value))
    if dataclasses.is_dataclass(value) or hasattr(value, "as_dict"):
        return sum(map(_size, getattr(value, "__dict__", {}).values()))
    return int(getattr(value, "nbytes", 8))
