"""Write one temporary file: collect batches and write them as row groups."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pyarrow as pa

from luminosity.io.writing import filesystem
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.encoders import encoder

__all__ = ["FileWriter", "WrittenFile"]

_GROUP_ROWS = 1 << 16  # Small row groups are slow to read and compress badly.
_GROUP_BYTES = 64 << 20  # bounds the memory that waiting batches need
_MOST_BYTES = 1 << 30  # of a file, so that readers can work on several files at once


@dataclass(frozen=True)
class WrittenFile:
    """A complete temporary file. ``schema`` is the table's; the file itself lacks the columns to partition by."""

    path: str
    partition: str
    rows: int
    size: int
    schema: pa.Schema

    def remove(self) -> None:
        """Remove the file, ignoring errors."""
        with contextlib.suppress(OSError):
            filesystem.remove_file(self.path)


class FileWriter:
    """Writes a file with a new name, so that a failed attempt never touches the file of another."""

    def __init__(self, destination: Destination, partition: str, schema: pa.Schema) -> None:
        self._partition = partition
        self._schema = schema
        self._most_rows = destination.rows_per_file
        self._is_durable = bool(destination.checkpoint_dir)
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._rows = 0
        self.waiting_bytes = 0
        path = filesystem.new_path(destination.temporary_folder, destination.suffix)
        self._file = filesystem.OutputFile(path, destination.whole_file_compression)
        try:
            # If the table is one CSV file, the last step joins several files and writes the header.
            self._encoder = encoder(destination, self._file.sink, schema, has_header=not destination.is_one_file)
        except BaseException:
            self._file.abandon()
            raise

    def add(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Add the rows that fit into the file, and return the rest for the next file."""
        rest = None
        if self._most_rows is not None and (room := self._most_rows - self._rows) < batch.num_rows:
            batch, rest = batch.slice(0, room), batch.slice(room)
        self._waiting.append(batch)
        self._rows += batch.num_rows
        self._waiting_rows += batch.num_rows
        self.waiting_bytes += batch.nbytes
        if self._waiting_rows >= _GROUP_ROWS or self.waiting_bytes >= _GROUP_BYTES:
            self.flush()
        return rest

    @property
    def is_full(self) -> bool:
        """Whether the file has reached its limit of rows or bytes."""
        return self._rows == self._most_rows or self._file.tell() >= _MOST_BYTES

    def flush(self) -> None:
        """Write the waiting batches as a row group."""
        if self._waiting:
            self._encoder.write(pa.Table.from_batches(self._waiting, self._schema))
        self._waiting, self._waiting_rows, self.waiting_bytes = [], 0, 0

    def close(self, schema: pa.Schema) -> WrittenFile:
        """Finish the file; ``schema`` is the table's."""
        self.flush()
        self._encoder.close()
        self._file.close()
        if self._is_durable:  # The checkpoint says soon that the rows are written.
            filesystem.sync(self._file.path, filesystem.split(self._file.path)[0])
        return WrittenFile(self._file.path, self._partition, self._rows, filesystem.size(self._file.path), schema)

    def abandon(self) -> None:
        """Remove the file after an error, ignoring further errors."""
        self._waiting.clear()
        with contextlib.suppress(OSError, ValueError, pa.ArrowException):
            self._encoder.close()
        self._file.abandon()
