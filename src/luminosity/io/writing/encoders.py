"""Encoders, which turn tables into the bytes of a format."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import types

from luminosity.errors import Fix, WriteError
from luminosity.io.formats import Format
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.json_encoder import json_lines
from luminosity.io.writing.parquet_encoder import ParquetEncoder

__all__ = ["Encoder", "encoder"]


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
