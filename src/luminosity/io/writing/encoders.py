"""Encoders of table formats: Parquet with the encoding and codec that suit each column, JSON lines, CSV and Arrow."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import math
from collections.abc import Generator, Iterator
from decimal import Decimal
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from pyarrow import compute, types

from luminosity.errors import Fix, WriteError
from luminosity.io.formats import LIST_SIZE, Format
from luminosity.io.writing.destination import Destination

__all__ = ["Encoder", "ParquetEncoder", "encoder", "json_lines"]
_SAMPLE_ROWS = 4096  # enough to see whether values repeat, cheap to count
_FEW = 0.5  # share of distinct values in the sample below which a dictionary saves space


class ParquetEncoder:
    """Writes Parquet. Columns with repeated values get a dictionary; by default, zstd compresses all but floats.

    A dictionary of values that hardly repeat, such as measured floats, makes writing row groups of 64k rows eight times
    slower and a quarter larger. Floats hardly shrink with any codec, and zstd takes twice as long as snappy for them.

    Parquet has no fixed-size lists; Arrow stores their size in its own schema in the metadata, and can't read such a
    column if it has nulls. So that schema is written last, and describes columns with nulls as plain lists;
    ``ReadTable`` restores their size.
    """

    def __init__(self, sink: Any, schema: pa.Schema, compression: str | None) -> None:
        self._sink = sink
        self._schema = schema
        self._compression = compression
        self._writer: Any = None
        self._with_nulls: set[str] = set()

    def write(self, table: pa.Table) -> None:
        """Write the rows as a row group."""
        if self._writer is None:
            self._writer = self._open(table)
        self._with_nulls |= {field.name for field in table.schema if table.column(field.name).null_count}
        self._writer.write_table(table)

    def close(self) -> None:
        """Write the footer."""
        if self._writer is None:
            self._writer = self._open(self._schema.empty_table())
        self._writer.add_key_value_metadata(self._notes())
        self._writer.close()

    @property
    def metadata(self) -> Any:
        """The footer, once the file is closed."""
        return self._writer.writer.metadata

    def _notes(self) -> dict[bytes, bytes]:
        fields = [_plain_list(field) if field.name in self._with_nulls else field for field in self._schema]
        note = pa.schema(fields, self._schema.metadata).serialize().to_pybytes()
        return {**(self._schema.metadata or {}), b"ARROW:schema": base64.b64encode(note)}

    def _open(self, first: pa.Table) -> Any:
        from pyarrow import parquet

        writer: Any = parquet.ParquetWriter  # Its annotations lack the last two parameters.
        return writer(
            self._sink,
            self._schema,
            compression=self._compression or _codecs(self._schema),
            store_schema=False,
            use_dictionary=[name for name in self._schema.names if _repeats(first.column(name))],
        )


def _plain_list(field: pa.Field) -> pa.Field:
    if not types.is_fixed_size_list(field.type):
        return field
    size = {LIST_SIZE: str(field.type.list_size).encode()}
    return field.with_type(pa.list_(field.type.value_field)).with_metadata({**(field.metadata or {}), **size})


def _repeats(column: pa.ChunkedArray) -> bool:
    """Return whether the first rows have few distinct values: only then a dictionary helps."""
    if types.is_dictionary(column.type):
        return True
    if types.is_nested(column.type) or types.is_floating(column.type) or isinstance(column.type, pa.BaseExtensionType):
        return False
    sample = column.slice(0, _SAMPLE_ROWS)
    try:
        return pc.count_distinct(sample, mode="all").as_py() <= _FEW * len(sample)
    except pa.ArrowNotImplementedError:
        return False


def _codecs(schema: pa.Schema) -> dict[str, str]:
    return {path: "snappy" if types.is_floating(kind) else "zstd" for f in schema for path, kind in _leaves(f)}


def _leaves(field: pa.Field, above: str = "") -> list[tuple[str, pa.DataType]]:
    """Return the columns that Parquet stores for a field, with the paths that it gives them.

    >>> _leaves(pa.field("points", pa.list_(pa.struct({"x": pa.float32()}))))
    [('points.list.element.x', DataType(float))]
    """
    path, kind = f"{above}{field.name}", field.type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if types.is_struct(kind):
        return [leaf for index in range(kind.num_fields) for leaf in _leaves(kind.field(index), f"{path}.")]
    if types.is_map(kind):
        key, value = pa.field("key", kind.key_type), pa.field("value", kind.item_type)
        return [*_leaves(key, f"{path}.key_value."), *_leaves(value, f"{path}.key_value.")]
    if types.is_nested(kind):
        return _leaves(kind.value_field.with_name("element"), f"{path}.list.")
    return [(path, kind)]


pc: Any = compute  # It creates its functions on import, so type checkers see none.
_ROWS = 8192  # encoded at once: bounds the memory of intermediate texts
_TEXT = pa.large_string()


def json_lines(table: pa.Table) -> Iterator[pa.Buffer]:
    """Yield the rows as JSON lines, in chunks.

    Times are ISO 8601, decimals are texts, durations are numbers in their unit, NaN and infinity are null.

    >>> table = pa.table({"at": pa.array([0], pa.timestamp("s", "UTC")), "x": [[1.0, float("nan")]]})
    >>> b"".join(json_lines(table))
    b'{"at":"1970-01-01T00:00:00Z","x":[1.0,null]}\\n'
    """
    names = [f"{',' if number else '{'}{json.dumps(name)}:" for number, name in enumerate(table.column_names)]
    for batch in table.to_batches(max_chunksize=_ROWS):
        pieces: list[Any] = []
        for name, column in zip(names, batch.columns, strict=True):
            pieces += [pa.scalar(name, _TEXT), _texts(_plain(column))]
        rows = pc.binary_join_element_wise(*pieces, pa.scalar("}\n", _TEXT), pa.scalar("", _TEXT))
        yield _joined(rows)


def _joined(rows: pa.LargeStringArray) -> pa.Buffer:
    """Return the texts as one buffer: in a new array they are contiguous."""
    _, offsets, data = rows.buffers()
    return data.slice(0, int(np.frombuffer(offsets, np.int64)[len(rows)]))


def _texts(column: pa.Array) -> pa.Array:
    """Return each value as JSON. Numbers are converted column by column, other values one by one."""
    kind = column.type
    if types.is_integer(kind) or types.is_boolean(kind):
        return pc.fill_null(column.cast(_TEXT), "null")
    if types.is_floating(kind):
        texts = column.cast(_TEXT)
        # Readers would mistake a float column of whole numbers for integers.
        is_whole = pc.match_substring_regex(texts, "^-?[0-9]+$")
        tail = pc.if_else(is_whole, pa.scalar(".0", _TEXT), pa.scalar("", _TEXT))
        return pc.fill_null(pc.binary_join_element_wise(texts, tail, pa.scalar("", _TEXT)), "null")
    return pa.array([_encoded(value) for value in column.to_pylist(maps_as_pydicts="strict")], _TEXT)


def _encoded(value: Any) -> str:
    try:
        return _STRICT.encode(value)
    except ValueError:  # a NaN within a list or a struct
        return _STRICT.encode(_without_nan(value))


def _plain(column: pa.Array) -> pa.Array:
    """Convert a column to a type that the JSON encoder knows."""
    kind = column.type
    if types.is_dictionary(kind):
        return _plain(column.cast(kind.value_type))
    if types.is_floating(kind):
        column = column.cast(pa.float32()) if types.is_float16(kind) else column
        return pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
    if types.is_timestamp(kind):
        if kind.tz is None:
            return pc.strftime(column, format="%Y-%m-%dT%H:%M:%S")
        return pc.strftime(column.cast(pa.timestamp(kind.unit, "UTC")), format="%Y-%m-%dT%H:%M:%SZ")
    if types.is_date(kind) or types.is_time(kind) or types.is_decimal(kind):
        return column.cast(pa.string())
    if types.is_duration(kind):
        return column.cast(pa.int64())
    return column


def _within(value: Any) -> Any:
    """Convert a value inside a list or struct to one that the JSON encoder knows."""
    if isinstance(value, datetime.datetime):
        if value.tzinfo is not None:
            return value.astimezone(datetime.timezone.utc).replace(tzinfo=None).isoformat() + "Z"
        return value.isoformat()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise WriteError(
        f"found a value of type {type(value).__name__}, which JSON can't hold",
        fix=Fix("write Parquet, or cast the column first", command="write Parquet, such as OUT.parquet"),
    )


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    return [_without_nan(part) for part in value] if isinstance(value, list) else value


_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_within)


class Encoder(Protocol):
    """Writes to a sink, which the caller closes. Each table becomes a row group if the format has row groups."""

    def write(self, table: pa.Table) -> None:
        """Write rows."""
        ...

    def close(self) -> None:
        """Write the end of the file, such as a footer."""
        ...


def encoder(destination: Destination, sink: Any, schema: pa.Schema, has_header: bool = True) -> Encoder:
    """Return the encoder of the destination's format; ``has_header`` is for CSV."""
    if destination.format is Format.PARQUET:
        return ParquetEncoder(sink, schema, destination.compression)
    if destination.format is Format.ARROW:
        return _Arrow(sink, schema, destination.compression or "lz4")
    if destination.format.is_csv:
        delimiter = "\t" if destination.format is Format.TSV else ","
        return _Csv(destination.path, sink, schema, has_header, delimiter)
    return _JsonLines(sink)


class _Arrow:
    def __init__(self, sink: Any, schema: pa.Schema, compression: str) -> None:
        # Batches have different dictionaries, and a file may have only one: write the values themselves.
        self._schema = pa.schema([_without_dictionary(field) for field in schema], schema.metadata)
        options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
        self._writer = pa.ipc.new_file(sink, self._schema, options=options)

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table.cast(self._schema).combine_chunks())

    def close(self) -> None:
        self._writer.close()


class _Csv:
    def __init__(self, path: str, sink: Any, schema: pa.Schema, has_header: bool, delimiter: str) -> None:
        from pyarrow import csv

        self._path = path
        self._schema = schema
        options = csv.WriteOptions(include_header=has_header, delimiter=delimiter)
        with self._refused():
            self._writer = csv.CSVWriter(sink, schema, write_options=options)

    def write(self, table: pa.Table) -> None:
        with self._refused():
            self._writer.write_table(table)

    def close(self) -> None:
        self._writer.close()

    @contextlib.contextmanager
    def _refused(self) -> Generator[None]:
        try:
            yield
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            kinds = ", ".join(f"{field.name!r} ({field.type})" for field in self._schema)
            raise WriteError(
                f"{self._path}: CSV can't hold these columns: {error}; found {kinds}",
                fix=Fix("write Parquet, or cast the columns first", command="write Parquet, such as OUT.parquet"),
            ) from error


class _JsonLines:
    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def write(self, table: pa.Table) -> None:
        for lines in json_lines(table):
            self._sink.write(lines)

    def close(self) -> None:
        """Do nothing: the file ends with its last line."""


def _without_dictionary(field: pa.Field) -> pa.Field:
    return field.with_type(field.type.value_type) if types.is_dictionary(field.type) else field
