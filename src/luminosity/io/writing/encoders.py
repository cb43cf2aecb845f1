"""Tables to the bytes of each format."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import types

from luminosity.errors import WriteError
from luminosity.io.formats import Format
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.json_encoder import json_lines
from luminosity.io.writing.parquet_encoder import ParquetEncoder

__all__ = ["Encoder", "encoder"]


class Encoder(Protocol):
    """Writes into a sink that is its caller's to close; each table becomes a row group, where there are such."""

    def write(self, table: pa.Table) -> None: ...

    def close(self) -> None:
        """Write what belongs to the end of the file."""
        ...


def encoder(destination: Destination, sink: Any, schema: pa.Schema, has_header: bool = True) -> Encoder:
    """``has_header``: whether a CSV file begins with the names of its columns."""
    if destination.format is Format.PARQUET:
        return ParquetEncoder(sink, schema, destination.compression)
    if destination.format is Format.ARROW:
        return _Arrow(sink, schema, destination.compression or "lz4")
    if destination.format is Format.CSV:
        return _Csv(destination.path, sink, schema, has_header)
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
        options = csv.WriteOptions(include_header=has_header)
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
                f"{self._path}: CSV can't take these columns: {error}. Found {kinds}; write Parquet, or cast before"
            ) from error


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
