"""The transforms that turn rows into tables and back."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.transforms.window import TimestampedValue

from luminosity.errors import Fix, InvalidArgument
from luminosity.tables.batch_builder import BatchBuilder
from luminosity.tables.gather import GatherDoFn
from luminosity.tables.row_maker import RowMaker
from luminosity.tables.row_times import TIMESTAMP, times_of
from luminosity.tables.types import row_hint, to_schema

__all__ = ["RowsFromTable", "TableFromRows"]


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
