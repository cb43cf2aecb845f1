"""Make rows from record batches: dicts, Beam Rows, or instances of a class."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import pyarrow as pa

from luminosity.errors import Fix, InvalidType, TableError
from luminosity.tables.schemas import conform
from luminosity.tables.to_python import (
    Maker,
    constructor_fields,
    maker_for_annotation,
    maker_for_row,
    python_values,
)
from luminosity.tables.types import field_hints, is_row_class

__all__ = ["RowMaker"]


class RowMaker:
    """Makes rows: dicts, Beam Rows, or instances of a dataclass or NamedTuple.

    >>> RowMaker(dict).rows(pa.record_batch({"text": ["a"], "vector": [[0.5]]}))
    [{'text': 'a', 'vector': [0.5]}]
    """

    def __init__(self, as_: Any, schema: pa.Schema | None = None) -> None:
        if as_ is not dict and as_ is not beam.Row and not is_row_class(as_):
            raise InvalidType(f"found as_={as_!r}, expected dict, beam.Row, or a dataclass or NamedTuple class")
        if schema is not None and as_ is not beam.Row:
            raise InvalidType(f"found schema= with as_={as_.__name__}, expected it only with beam.Row")
        self._as = as_
        self.schema = schema

    def rows(self, batch: pa.RecordBatch) -> list[Any]:
        """Return the rows of a batch, in order."""
        if self._as is dict:
            names, columns = batch.schema.names, [_values(batch, name, None) for name in batch.schema.names]
            return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        if self.schema is not None:
            batch = conform(batch, self.schema, "RowsFromTable(schema=)")
        makers = _row_makers(batch) if self._as is beam.Row else self._class_makers(batch)
        columns = [_values(batch, name, maker) for name, maker in makers.items()]
        return [self._as(**dict(zip(makers, row, strict=True))) for row in zip(*columns, strict=True)]

    def _class_makers(self, batch: pa.RecordBatch) -> dict[str, Maker | None]:
        fields = constructor_fields(self._as)
        missing = [name for name, has_default in fields.items() if not has_default and name not in batch.schema.names]
        if missing:
            raise TableError(
                f"found the columns {', '.join(batch.schema.names)}, expected also {', '.join(missing)}, "
                f"which {self._as.__name__} has no defaults for"
            )
        hints = field_hints(self._as) or {}
        return {name: maker_for_annotation(hints[name]) for name in fields if name in batch.schema.names}


def _row_makers(batch: pa.RecordBatch) -> dict[str, Maker | None]:
    return {field.name: maker_for_row(field.type) for field in batch.schema}


def _values(batch: pa.RecordBatch, name: str, maker: Maker | None) -> list[Any]:
    array = batch.column(name)
    try:
        values = python_values(array)
    except (pa.ArrowInvalid, ValueError, OverflowError) as error:
        raise TableError(
            f"column {name!r} of type {array.type} has values that Python can't hold: {error}",
            fix=Fix('cast the column first with MapTable, for example to timestamp("us") or to integers'),
        ) from error
    return values if maker is None else [None if value is None else maker(value) for value in values]
