"""Reads the Parquet files of lakes, whose columns may differ from the table's, and leaves out files by statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from luminosity.errors import TableError
from luminosity.io.lakes.columns import plain_type
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.named_table import Part
from luminosity.io.reading.parquet_reader import OpenFile, ParquetReader
from luminosity.io.reading.selection import Selection

__all__ = ["Bounds", "PartReader", "possible_parts"]


class PartReader(ParquetReader):
    """Reads a data file: finds each column by the name that the file has for it, adds nulls, and leaves rows out.

    ``names`` has the file's name of each column of the table; a column that is not there is null. ``kept`` says which
    rows of the file are not deleted.
    """

    def __init__(
        self,
        part: Part,
        selection: Selection,
        rows: int,
        open_file: OpenFile,
        names: Mapping[str, str] | None = None,
        kept: np.ndarray[Any, Any] | None = None,
    ) -> None:
        self._names = names
        self._kept_rows = kept
        self._path = part.path
        self._target = selection.loaded
        self._sources: list[str | None] = []
        super().__init__(part, selection, rows, open_file)

    def _columns_to_read(self, file: TableFile, selection: Selection, found: pa.Schema) -> list[str]:
        names = {name: name for name in found.names} if self._names is None else self._names
        self._sources = [names.get(name) for name in selection.loaded.names]
        # Without any column, the file would not tell how many rows it has.
        return [name for name in self._sources if name is not None] or found.names[:1]

    def _finished(self, batch: pa.RecordBatch, first_row: int) -> pa.RecordBatch:
        arrays = [self._array(batch, *pair) for pair in zip(self._target, self._sources, strict=True)]
        finished = pa.RecordBatch.from_arrays(arrays, schema=self._target)
        if self._kept_rows is None:
            return finished
        return finished.filter(pa.array(self._kept_rows[first_row : first_row + batch.num_rows]))

    def _array(self, batch: pa.RecordBatch, field: pa.Field, source: str | None) -> pa.Array:
        if source is None:
            return pa.nulls(batch.num_rows, field.type)
        column = batch.column(source)
        if column.type == field.type:
            return column
        try:
            return column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise TableError(
                f"{self._path}: column {source!r}: found {column.type}, expected {field.type} as in the table: {error}"
            ) from error


@dataclass(frozen=True)
class Bounds:
    """What the metadata of a table say about the values of a column in one file; None is not known."""

    least: Any
    most: Any
    nulls: int | None


def possible_parts(parts: Sequence[tuple[Part, Mapping[str, Bounds]]], schema: pa.Schema, where: Any) -> list[Part]:
    """Return the parts that may have a row on which ``where`` holds, in the order of their paths.

    >>> part = Part("a.parquet", 1, None, rows=3)
    >>> import pyarrow.compute as pc
    >>> schema = pa.schema({"n": pa.int64()})
    >>> [possible_parts([(part, {"n": Bounds(1, 5, 0)})], schema, pc.field("n") > least) == [part] for least in (4, 5)]
    [True, False]
    """
    parts = sorted(parts, key=lambda part: part[0].path)
    if where is None:
        return [part for part, _ in parts]
    from pyarrow import dataset, fs

    form: Any = dataset.ParquetFileFormat()
    kept: list[Part] = []
    for part, bounds in parts:
        known = _condition(bounds, schema)
        if known is None:
            kept.append(part)
            continue
        # Nothing is opened: the condition that holds for all rows is enough to decide.
        fragment = form.make_fragment("unopened", fs.LocalFileSystem(), partition_expression=known)
        one: Any = dataset.FileSystemDataset([fragment], schema, form, fs.LocalFileSystem())
        if any(True for _ in one.get_fragments(filter=where)):
            kept.append(part)
    return kept


def _condition(bounds: Mapping[str, Bounds], schema: pa.Schema) -> Any:
    """Return a condition that holds for all rows of a file, or None."""
    from pyarrow import compute

    whole: Any = None
    for name, known in bounds.items():
        if name not in schema.names or not _is_ordered(kind := schema.field(name).type):
            continue
        least, most = known.least, known.most
        if least is None or most is None:
            continue
        column = compute.field(name)
        held = (column >= pa.scalar(least, kind)) & (column <= pa.scalar(most, kind))
        if known.nulls != 0:
            held = held | column.is_null()
        whole = held if whole is None else whole & held
    return whole


def _is_ordered(kind: pa.DataType) -> bool:
    """Return whether bounds hold for all values: those of floats leave NaN out."""
    kind = plain_type(kind)
    return bool(types.is_integer(kind) or types.is_string(kind) or types.is_date32(kind) or types.is_timestamp(kind))
