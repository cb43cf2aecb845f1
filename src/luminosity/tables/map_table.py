"""The transforms that change a table one batch at a time: with a function, or by adding ids."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

import apache_beam as beam
import pyarrow as pa

from luminosity._shared.text import list_some
from luminosity.core import ELEMENT_AT_FAULT
from luminosity.errors import Fix, InvalidArgument, InvalidType, LuminosityError, TableError
from luminosity.tables.frames import Kind, from_result, kind_of, name_of, place_of, to_frame
from luminosity.tables.schemas import SameSchema, conform, remember_schema

__all__ = ["AddRowIds", "MapTable"]


class MapTable(beam.ParDo):
    """Changes a table with a function of a record batch, of a pandas frame or of a polars frame.

    >>> def long_ones(batch: pa.RecordBatch) -> pa.RecordBatch:
    ...     return batch.filter(pa.compute.greater(pa.compute.utf8_length(batch["text"]), 3))
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     table = pipeline | beam.Create([pa.record_batch({"text": ["fine", "no"]})])
    ...     _ = table | MapTable(long_ones) | beam.Map(lambda batch: print(batch.to_pylist()))
    [{'text': 'fine'}]

    The function may return more or fewer rows; a result without rows emits no element. The annotation of its first
    parameter says what it gets: a ``pyarrow.RecordBatch`` (also without an annotation), a ``pyarrow.Table``, a
    ``pandas.DataFrame`` or a ``polars.DataFrame``. It returns the same, or a record batch or table of Arrow.

    Batches with the same columns must give results with the same columns. A type that depends on the values (a new
    column that is null in all rows of a batch, whole numbers in one batch and fractions in the next) is an error;
    pass ``schema`` then.

    Args:
        fn: the function. Its exceptions get the function's name and the batch's columns added to their messages.
        args: further arguments of the function, including side inputs, as ``beam.Map`` takes them.
        as_: what the function gets if there is no annotation: ``"arrow"`` (default), ``"pandas"`` or ``"polars"``.
        schema: the columns of the results, which are cast to it.
        kwargs: further named arguments of the function.

    ``.with_exception_handling()`` works as for ``beam.ParDo``: failed batches become a second output.
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
            raise InvalidType(
                f"found {fn!r}, expected a function of a pyarrow.RecordBatch, or of a pandas or polars frame"
            )
        if schema is not None and not isinstance(schema, pa.Schema):
            raise InvalidType(f"found schema={schema!r}, expected a pyarrow.Schema")
        mapper = _Mapper(fn, kind_of(fn, as_), schema)

        def run(batch: Any, *args: Any, **kwargs: Any) -> list[Any]:
            return mapper.run(batch, *args, **kwargs)

        # As in Beam's own Map: Beam looks there for arguments and defaults such as beam.DoFn.TimestampParam, and would
        # mistake the annotations of `run` for those of the function.
        run._argspec_fn = fn  # type: ignore[attr-defined]
        run.__annotations__.clear()
        super().__init__(run, *args, **kwargs)
        self.with_output_types(pa.RecordBatch)
        self._name = name_of(fn)
        self._schema = schema

    def expand(self, pcoll: Any) -> Any:  # type: ignore[override]  # Beam has no annotations here.
        """Apply the function, and note the columns for the transforms that follow if they are known."""
        table = super().expand(pcoll)
        return table if self._schema is None else remember_schema(table, self._schema)

    def default_label(self) -> str:
        """Return a label with the function's name, such as ``MapTable(clean)``."""
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
                "pyarrow.RecordBatch",
                fix=Fix("apply TableFromRows() first, which makes them from dicts, Beam Rows and dataclasses"),
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
        """Add the place and the batch to an error. Its type stays, for ``with_exception_handling(exc_class=)``."""
        columns = ", ".join(f"{field.name}: {field.type}" for field in batch.schema)
        what = f"a batch of {batch.num_rows} rows with the columns {columns}"
        if error.args and isinstance(error.args[0], str):
            where = f"[in {name_of(self._fn)}, {place_of(self._fn, error)}, on {what}]"
            error.args = (f"{error.args[0]} {where}", *error.args[1:])
            if isinstance(error, LuminosityError):
                error.message = f"{error.message} {where}"
        setattr(error, ELEMENT_AT_FAULT, what)


_ID_BYTES = 16  # of a UUID
_SHOWN_COLUMNS = 20  # in a message, which stays readable


class AddRowIds(beam.PTransform[Any, Any]):
    """Adds a column of ids to a table: a UUID for each row, computed from the values of its columns.

    The same values give the same id in every run, so a store that is written again is updated, not extended. Rows with
    the same values have the same id.

    >>> rows = pa.record_batch({"text": ["a", "b", "a"], "score": [1.0, 2.0, 3.0]})
    >>> with beam.Pipeline("FnApiRunner") as pipeline:
    ...     table = pipeline | beam.Create([rows]) | AddRowIds(columns=["text"])
    ...     _ = table | beam.Map(lambda batch: print(batch.schema.names, len(set(batch["id"].to_pylist()))))
    ['text', 'score', 'id'] 2

    Args:
        name: the new column.
        columns: the columns to compute the id from; None takes all. Leave out columns that change from run to run,
            such as the outputs of models.
    """

    def __init__(self, name: str = "id", columns: Sequence[str] | None = None) -> None:
        super().__init__()
        if isinstance(columns, str):
            raise InvalidArgument(f"found columns={columns!r}, expected a list of names, such as [{columns!r}]")
        self._name = name
        self._columns = None if columns is None else list(columns)

    def expand(self, pcoll: Any) -> Any:  # type: ignore[override]
        """Hash the columns of each row, and append the ids as a column."""
        return pcoll | "Hash" >> MapTable(_with_ids, self._name, self._columns)


def _with_ids(batch: Any, name: str, columns: list[str] | None) -> Any:
    names = batch.schema.names
    if name in names:
        raise TableError(f"there is a column {name!r} already", fix=Fix("pass another name="))
    if missing := [column for column in columns or () if column not in names]:
        raise TableError(f"there is no column {missing[0]!r}, expected one of {list_some(names, _SHOWN_COLUMNS)}")
    hashed = batch if columns is None else batch.select([column for column in names if column in columns])
    return batch.append_column(name, pa.array([_row_id(row) for row in hashed.to_pylist()], pa.string()))


def _row_id(row: dict[str, Any]) -> str:
    content = json.dumps(row, sort_keys=True, default=str).encode()
    return str(uuid.UUID(bytes=hashlib.blake2b(content, digest_size=_ID_BYTES).digest()))
