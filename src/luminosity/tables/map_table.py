"""A function over a table, one batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import apache_beam as beam
import pyarrow as pa

from luminosity.core import ELEMENT_AT_FAULT
from luminosity.errors import TableError
from luminosity.tables.frames import Kind, from_result, kind_of, to_frame
from luminosity.tables.function_names import name_of, place_of
from luminosity.tables.schemas import SameSchema, conform

__all__ = ["MapTable"]


class MapTable(beam.ParDo):
    """Changes a table with a function of a record batch, of a pandas frame or of a polars frame.

    >>> def long_ones(batch: pa.RecordBatch) -> pa.RecordBatch:
    ...     return batch.filter(pa.compute.greater(pa.compute.utf8_length(batch["text"]), 3))
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     table = pipeline | beam.Create([pa.record_batch({"text": ["fine", "no"]})])
    ...     _ = table | MapTable(long_ones) | beam.Map(lambda batch: print(batch.to_pylist()))
    [{'text': 'fine'}]

    The function may return more rows or fewer; of no rows there is no element. The annotation of its first parameter
    says what it gets: a `pyarrow.RecordBatch` (also without an annotation), a `pyarrow.Table`, a `pandas.DataFrame` or
    a `polars.DataFrame`. It returns the same, or what Arrow has.

    Results must have the same columns for all batches that have. A type that depends on the values (a new column that
    is null in all rows of a batch, whole numbers in one batch and fractions in the next) is an error; `schema` helps.

    Args:
        fn: the function. What it raises is raised, with the function's name and the batch's columns in the message.
        args: further arguments of it, also side inputs, as `beam.Map` takes them.
        as_: what it gets, where there is no annotation; a record batch where neither says.
        schema: what the columns are afterwards; results are cast to it.
        kwargs: further named arguments of it.

    `.with_exception_handling()` is Beam's: batches on which it failed, in place of the error.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        as_: Literal["arrow", "pandas", "polars"] | None = None,
        schema: pa.Schema | None = None,
        **kwargs: Any,
    ) -> None:
        if not callable(fn):
            raise TypeError(
                f"found {fn!r}, expected a function of a pyarrow.RecordBatch, or of a pandas or polars frame"
            )
        if schema is not None and not isinstance(schema, pa.Schema):
            raise TypeError(f"found schema={schema!r}, expected a pyarrow.Schema")
        mapper = _Mapper(fn, kind_of(fn, as_), schema)

        def run(batch: Any, *args: Any, **kwargs: Any) -> list[Any]:
            return mapper.run(batch, *args, **kwargs)

        # As Beam's own Map does: there it finds arguments and defaults such as beam.DoFn.TimestampParam, and it would
        # take the annotations here for those of the function.
        run._argspec_fn = fn  # type: ignore[attr-defined]
        run.__annotations__.clear()
        super().__init__(run, *args, **kwargs)
        self.with_output_types(pa.RecordBatch)
        self._name = name_of(fn)

    def default_label(self) -> str:
        return f"MapTable({self._name})"


class _Mapper:
    def __init__(self, fn: Callable[..., Any], kind: Kind, schema: pa.Schema | None) -> None:
        self._fn = fn
        self._kind: Kind = kind
        self._schema = schema
        self._same = SameSchema()

    def run(self, batch: pa.RecordBatch, *args: Any, **kwargs: Any) -> list[pa.RecordBatch]:
        if not isinstance(batch, pa.RecordBatch):
            raise TableError(
                f"MapTable({name_of(self._fn)}): found an element of type {type(batch).__name__}, expected a "
                "pyarrow.RecordBatch; TableFromRows() makes them of dicts, Beam Rows and dataclasses"
            )
        frame = to_frame(batch, self._kind)
        try:
            result = self._fn(frame, *args, **kwargs)
        except Exception as error:
            self._explain(error, batch)
            raise
        who = f"{name_of(self._fn)} ({place_of(self._fn)})"
        table = from_result(result, self._kind, who, batch.schema, self._schema)
        if not table.num_rows:
            return []
        if self._schema is not None:
            return [conform(table, self._schema, f"{who} with MapTable(schema=)")]
        return [self._same.check(batch.schema, table, who)]

    def _explain(self, error: Exception, batch: pa.RecordBatch) -> None:
        """Its type stays, so that `with_exception_handling(exc_class=)` finds it."""
        columns = ", ".join(f"{field.name}: {field.type}" for field in batch.schema)
        what = f"a batch of {batch.num_rows} rows with the columns {columns}"
        if error.args and isinstance(error.args[0], str):
            where = f"[in {name_of(self._fn)}, {place_of(self._fn, error)}, on {what}]"
            error.args = (f"{error.args[0]} {where}", *error.args[1:])
        setattr(error, ELEMENT_AT_FAULT, what)
