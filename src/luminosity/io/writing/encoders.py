"""Tables to the bytes of each format."""

from __future__ import annotations

from typing import Any, Protocol

import pyarrow as pa
from pyarrow import types

from luminosity.errors import WriteError
from luminosity.io.formats import Format
from luminosity.io.writing.json_lines import json_lines
from luminosity.io.writing.parquet import ParquetEncoder
from luminosity.io.writing.target import Target

__all__ = ["Encoder", "encoder"]


class Encoder(Protocol):
    """Writes into a sink that is its caller's to close; each table becomes a row group, where there are such."""

    def write(self, table: pa.Table) -> None: ...

    def close(self) -> None:
        """Write what belongs to the end of the file."""
        ...


def encoder(target: Target, sink: Any, schema: pa.Schema, has_header: bool = True) -> Encoder:
    """``has_header``: whether a CSV file begins with the names of its columns."""
    if target.format is Format.PARQUET:
        return ParquetEncoder(sink, schema, target.compression)
    if target.format is Format.ARROW:
        return _Arrow(sink, schema, target.compression or "lz4")
    if target.format is Format.CSV:
        return _Csv(target.path, sink, schema, has_header)
    return _JsonLines(sink)


class _Arrow:
    def __init__(self, sink: Any, schema: pa.Schema, compression: str) -> None:
        # A file may not change a dictionary on its way, and batches bring their own: values are written plainly.
        self._schema = pa.schema([_without_dictionary(field) for field in schema], schema.metadata)
        options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
        self._writer = pa.ipc.new_file(sink, self._schema, options=options)

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table.cast(self._schema).combine_chunks())

    def close(self) -> None:
        self._writer.close()


class _Csv:
    def __init__(self, path: str, sink: Any, schema: pa.Schema, has_header: bool) -> None:
        from pyarrow import csv

        self._path = path
        self._schema = schema
        self._writer = csv.CSVWriter(sink, schema, write_options=csv.WriteOptions(include_header=has_header))

    def write(self, table: pa.Table) -> None:
        try:
            self._writer.write_table(table)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            kinds = ", ".join(f"{field.name!r} ({field.type})" for field in self._schema)
            raise WriteError(
                f"{self._path}: CSV can't take these columns: {error}. Found {kinds}; write Parquet, or cast before"
            ) from error

    def close(self) -> None:
        self._writer.close()


class _JsonLines:
    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def write(self, table: pa.Table) -> None:
        for lines in json_lines(table):
            self._sink.write(lines)

    def close(self) -> None:
        """Its last line is its end."""


def _without_dictionary(field: pa.Field) -> pa.Field:
    return field.with_type(field.type.value_type) if types.is_dictionary(field.type) else field
