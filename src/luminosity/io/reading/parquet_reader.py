"""Readers of columnar files: Parquet, and Arrow IPC, as files whose batches are read one by one or as streams."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from itertools import accumulate, combinations
from typing import Any

import pyarrow as pa

from luminosity.io.formats import LIST_SIZE
from luminosity.io.reading.find_files import TableFile, open_bytes
from luminosity.io.reading.reader import BATCH_BYTES, ByteRange, Claim, Reader, claim_whole
from luminosity.io.reading.selection import Selection, columns_of, partition_condition

__all__ = ["ArrowReader", "ParquetReader", "arrow_schema", "parquet_rows", "parquet_schema"]
_MAGIC_OF_FILES = b"ARROW1"


class ArrowReader(Reader):
    """Reads Arrow IPC. Only pyarrow knows where record batches lie, so they are assumed to be evenly spaced."""

    def __init__(self, file: TableFile, selection: Selection) -> None:
        schema = arrow_schema(file)
        selection.check(file.path, schema)
        self._size = file.size
        self._source = open_bytes(file)
        self._is_file = _is_file(self._source)
        columns = [schema.get_field_index(name) for name in selection.loaded.names]
        self._options = pa.ipc.IpcReadOptions(included_fields=columns)

    def cuts(self) -> list[int] | None:
        """Return None for a file, which can be cut anywhere, and no cuts for a stream, which is read in one piece."""
        return None if self._is_file else []

    def batches(self, byte_range: ByteRange, claim: Claim) -> Iterator[pa.RecordBatch]:
        """Yield the record batches that begin in this range, or the whole stream."""
        reader = _open(self._source, self._options)
        if not self._is_file:
            if claim_whole(byte_range.start, claim):
                yield from reader
            return
        count = reader.num_record_batches
        for number in range(count):
            position = self._size * number // count
            if position < byte_range.start:
                continue
            if claim(position + 1) <= position:
                return
            yield reader.get_batch(number)

    def close(self) -> None:
        """Close the file."""
        self._source.close()


def arrow_schema(file: TableFile) -> pa.Schema:
    """Return the schema that the file starts or ends with."""
    with open_bytes(file) as source:
        return _open(source, None).schema


def _open(source: pa.NativeFile, options: Any) -> Any:
    return (pa.ipc.open_file if _is_file(source) else pa.ipc.open_stream)(source, options=options)


def _is_file(source: pa.NativeFile) -> bool:
    source.seek(0)
    magic = source.read(len(_MAGIC_OF_FILES))
    source.seek(0)
    return magic == _MAGIC_OF_FILES


OpenFile = Callable[[TableFile], pa.NativeFile]
_MOST_FLOATS = 4  # columns in a condition: each doubles the number of checks, as it may be NaN or not


class ParquetReader(Reader):
    """Reads Parquet, by row groups and stretches of rows inside them.

    pyarrow can't skip rows, so a range that begins inside a row group decodes the rows before it in vain. Files are
    therefore first cut between row groups, and inside them only when a runner splits a range that a worker is reading.
    If the same worker gets the rest of the range, decoding continues where it stopped.
    """

    def __init__(self, file: TableFile, selection: Selection, rows: int, open_file: OpenFile = open_bytes) -> None:
        from pyarrow import parquet

        self._source = open_file(file)
        self._file: Any = parquet.ParquetFile(self._source, pre_buffer=True)
        self._loaded = selection.loaded
        self._columns = self._columns_to_read(file, selection, _with_list_sizes(self._file.schema_arrow))
        self._layout = _Layout(self._file.metadata, file.size, rows, set(self._columns))
        # Statistics are compared as the table's types: columns of other files may have others.
        prunes = selection.where is not None and _types(self._file.schema_arrow, self._columns) == self._loaded.types
        self._kept = _row_groups_to_read(file, selection, open_file) if prunes else None
        self._decoding: _RowGroup | None = None

    def _columns_to_read(self, file: TableFile, selection: Selection, found: pa.Schema) -> list[str]:
        """Return the columns of the file to read. Raises if the file does not have the table's columns."""
        selection.check(file.path, found)
        return selection.loaded.names

    def cuts(self) -> list[int]:
        """Return the positions of the row groups."""
        return [self._layout.position(group, 0) for group in range(self._file.num_row_groups)]

    def batches(self, byte_range: ByteRange, claim: Claim) -> Iterator[pa.RecordBatch]:
        """Decode the stretches of rows that begin in this range, except in row groups that ``where`` excludes."""
        for group in range(self._file.num_row_groups):
            for stretch in range(self._layout.stretches(group)):
                position = self._layout.position(group, stretch)
                if position < byte_range.start:
                    continue
                if claim(position + 1) <= position:
                    return
                if self._kept is None or group in self._kept:
                    yield from self._decode(group, stretch)

    def _decode(self, group: int, stretch: int) -> Iterator[pa.RecordBatch]:
        rows = self._layout.stretch_rows[group]
        decoding = self._decoding
        if decoding is None or decoding.number != group or decoding.at > stretch * rows:
            batches = self._file.iter_batches(rows, row_groups=[group], columns=self._columns)
            self._decoding = decoding = _RowGroup(group, batches)
        for _ in decoding.up_to(stretch * rows):
            pass
        first = self._layout.first_rows[group]
        at = first + decoding.at
        for batch in decoding.up_to(min((stretch + 1) * rows, self._layout.rows[group])):
            yield self._finished(batch, at)
            at += batch.num_rows

    def _finished(self, batch: pa.RecordBatch, first_row: int) -> pa.RecordBatch:
        """Drop columns that pyarrow read because their names have the same beginning: ``a`` brings ``a.b``.

        ``first_row`` is the number of the batch's first row in the file.
        """
        batch = batch.select(self._columns)
        return batch if batch.schema.types == self._loaded.types else batch.cast(self._loaded)

    def close(self) -> None:
        """Close the file, and drop the row group that is being decoded."""
        self._decoding = None
        self._file.close()
        self._source.close()


def _types(schema: pa.Schema, columns: list[str]) -> list[pa.DataType]:
    return [_with_list_sizes(schema).field(name).type for name in columns]


def parquet_schema(file: TableFile) -> pa.Schema:
    """Return the schema of the file, as it was before it was written."""
    from pyarrow import parquet

    with open_bytes(file) as source:
        return _with_list_sizes(parquet.read_schema(source))


def parquet_rows(file: TableFile) -> int:
    """Return the number of rows, from the file's footer."""
    from pyarrow import parquet

    with open_bytes(file) as source:
        return parquet.read_metadata(source).num_rows


def _with_list_sizes(schema: pa.Schema) -> pa.Schema:
    """Return the schema before it was written: fixed-size lists with nulls are stored as plain lists."""
    fields = list(schema)
    for at, field in enumerate(fields):
        size = (field.metadata or {}).get(LIST_SIZE)
        if size is not None and pa.types.is_list(field.type):
            fields[at] = field.with_type(pa.list_(field.type.value_field, int(size)))
    return pa.schema(fields, schema.metadata)


class _RowGroup:
    """A row group that is being decoded, and the next row in it."""

    def __init__(self, number: int, batches: Iterator[pa.RecordBatch]) -> None:
        self.number = number
        self.at = 0
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    def up_to(self, row: int) -> Iterator[pa.RecordBatch]:
        """Decode and yield the rows before ``row`` that were not decoded yet."""
        while self.at < row:
            batch = next(self._batches) if self._rest is None else self._rest
            part = batch.slice(0, row - self.at)
            self._rest = batch.slice(part.num_rows) if part.num_rows < batch.num_rows else None
            self.at += part.num_rows
            yield part


class _Layout:
    """Estimates where row groups and stretches of their rows begin in the file, from the sizes of the row groups."""

    def __init__(self, metadata: Any, size: int, rows: int, columns: set[str]) -> None:
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        weights = [0, *accumulate(group.total_byte_size for group in groups)]
        self._starts = [weight * size // max(1, weights[-1]) for weight in weights]
        self.rows = [int(group.num_rows) for group in groups]
        self.first_rows = [0, *accumulate(self.rows)]
        self.stretch_rows = [_rows_at_once(group, rows, columns) for group in groups]

    def stretches(self, group: int) -> int:
        """Return the number of stretches in a row group."""
        return -(-self.rows[group] // self.stretch_rows[group])

    def position(self, group: int, stretch: int) -> int:
        """Return the byte at which a stretch is assumed to begin."""
        start, stop = self._starts[group : group + 2]
        return start + (stop - start) * stretch // max(1, self.stretches(group))


def _rows_at_once(group: Any, most: int, columns: set[str]) -> int:
    """Return the most rows that keep a batch within its limit of bytes, counting only the columns that are read."""
    if group.total_byte_size * most <= BATCH_BYTES * group.num_rows:
        return most
    chunks = (group.column(number) for number in range(group.num_columns))
    size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns)
    return max(1, min(most, BATCH_BYTES * group.num_rows // max(1, size)))


def _row_groups_to_read(file: TableFile, selection: Selection, open_file: OpenFile) -> set[int] | None:
    """Return the row groups that may contain a selected row, by statistics and folder names; None means all.

    Statistics ignore NaN, which may be in any row group: the condition is checked again for every combination of NaN.
    """
    from pyarrow import compute, dataset

    whole = pa.schema([*selection.stored, *selection.partition])
    used = [field for field in selection.loaded if field.name in columns_of(selection.where, whole)]
    floats = [field for field in used if pa.types.is_floating(field.type)]
    if len(floats) > _MOST_FLOATS or any(pa.types.is_nested(field.type) for field in used):
        return None
    nan = [compute.field(field.name) == pa.scalar(math.nan, field.type) for field in floats]
    known = partition_condition(selection.partition, file.partition)
    kept: set[int] = set()
    with open_file(file) as source:
        for count in range(len(nan) + 1):
            for some in combinations(nan, count):
                conditions = [*some, *([] if known is None else [known])]
                given = functools.reduce(operator.and_, conditions) if conditions else None
                fragment = dataset.ParquetFileFormat().make_fragment(source, partition_expression=given)
                kept |= {group.id for group in fragment.subset(filter=selection.where, schema=whole).row_groups}
    return kept
