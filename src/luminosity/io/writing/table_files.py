"""The files of a table: how temporary ones are written, their final names, and how several become one."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from luminosity._shared.shared_files import text_digest
from luminosity.io.formats import Format
from luminosity.io.writing import filesystem
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.encoders import encoder

__all__ = ["FileWriter", "Move", "WrittenFile", "final_names", "joined"]

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


_CHUNK_BYTES = 4 << 20  # copied at once: more would not be faster
_SMALL_BYTES = 4 << 20  # Opening a smaller file takes readers longer than reading it.
_JOINED_BYTES = 32 << 20  # of a file that is made of small ones
# One step joins the files, so it must not take long: a second or two, whatever the size of the table.
_MOST_JOINED_BYTES = 128 << 20
_MOST_JOINED_FILES = 1_000
# A stream writes small files every second, and nothing waits for the joining of a window except the window itself.
_MOST_JOINED_BYTES_OF_PANE = 1 << 30


class Move(NamedTuple):
    """Temporary files that become one final file; several are joined."""

    sources: tuple[WrittenFile, ...]
    final: str


def final_names(destination: Destination, written: list[WrittenFile], pane: str | None = None) -> list[Move]:
    """Return the final files. The result depends only on the arguments, so that a retry comes to the same names.

    ``pane`` names the window and pane of a stream that the files hold, and becomes a part of their names.
    """
    with_rows = [file for file in written if file.rows] or written[:1]
    with_rows.sort(key=lambda file: (file.partition, file.path))
    if destination.is_one_file:
        return [Move(tuple(with_rows), destination.path)] if with_rows else []
    # A run that appends needs names that no other run gives. So does a stream where folders have no locks: a worker
    # that removes the old files may be late, and must not find a file of a new pane under an old name.
    is_unique = destination.if_exists == "append" or (pane is not None and not filesystem.is_local(destination.path))
    mark = f"-{_digest(with_rows)}" if is_unique else ""
    most = (_MOST_JOINED_FILES, _MOST_JOINED_BYTES) if pane is None else (len(with_rows), _MOST_JOINED_BYTES_OF_PANE)
    groups = _joined_groups(with_rows, destination.rows_per_file, *most)
    prefix = "part" if pane is None else f"part-{pane}"
    counts = Counter(group[0].partition for group in groups)
    numbers: Counter[str] = Counter()
    moves: list[Move] = []
    for group in groups:
        partition = group[0].partition
        name = f"{prefix}-{numbers[partition]:05}-of-{counts[partition]:05}{mark}{destination.suffix}"
        numbers[partition] += 1
        moves.append(Move(group, filesystem.join(destination.path, partition, name)))
    return moves


def _joined_groups(
    files: list[WrittenFile], most_rows: int | None, most_joined: int, most_joined_bytes: int
) -> list[tuple[WrittenFile, ...]]:
    """Return the files, of which small ones of the same partition are put together: each becomes one final file."""
    small: set[str] = set()
    total = 0
    for file in sorted(files, key=lambda file: (file.size, file.path))[:most_joined]:
        total += file.size
        if file.size >= _SMALL_BYTES or total > most_joined_bytes:
            break
        small.add(file.path)
    groups: list[list[WrittenFile]] = []
    latest: dict[str, list[WrittenFile]] = {}  # the group of each partition that may take more
    for file in files:
        group = latest.get(file.partition) if file.path in small else None
        if group is not None and _fits(file, group, most_rows):
            group.append(file)
            continue
        groups.append([file])
        if file.path in small:
            latest[file.partition] = groups[-1]
    return [tuple(group) for group in groups]


def _fits(file: WrittenFile, group: list[WrittenFile], most_rows: int | None) -> bool:
    rows = file.rows + sum(other.rows for other in group)
    size = file.size + sum(other.size for other in group)
    return size <= _JOINED_BYTES and (most_rows is None or rows <= most_rows)


def _digest(written: list[WrittenFile]) -> str:
    return text_digest(*(file.path for file in written), digits=12)


def joined(destination: Destination, sources: tuple[WrittenFile, ...]) -> str:
    """Return the path of a temporary file with all rows of the sources."""
    lacks_header = destination.is_one_file and destination.format.is_csv
    if len(sources) == 1 and not lacks_header:
        return sources[0].path
    if destination.format.is_csv and not destination.is_one_file:
        return _joined_csv(destination, sources)
    if destination.format.is_text:
        return _joined_text(destination, sources)
    return _joined_columns(destination, sources)


def _joined_text(destination: Destination, sources: tuple[WrittenFile, ...]) -> str:
    """Concatenate text. Compressed streams can be concatenated too: all readers accept them."""
    with _new_file(destination, None) as output:
        if destination.format.is_csv:
            output.sink.write(_header(destination, sources[0].schema, destination.whole_file_compression))
        for source in sources:
            with filesystem.open_input(source.path) as file:
                _copy(file, output)
    return output.path


def _joined_csv(destination: Destination, sources: tuple[WrittenFile, ...]) -> str:
    """Concatenate CSV files that have headers, of which only the first is kept."""
    codec = destination.whole_file_compression
    header = len(_header(destination, _schema_of_files(destination, sources[0]), None))
    with _new_file(destination, codec) as output:
        for number, source in enumerate(sources):
            with filesystem.open_input(source.path) as file:
                text = pa.CompressedInputStream(file, codec) if codec else file
                if number:
                    text.read(header)
                _copy(text, output)
    return output.path


@contextlib.contextmanager
def _new_file(destination: Destination, codec: str | None) -> Generator[filesystem.OutputFile]:
    """Open a new temporary file, and close it, or remove it if the block raises."""
    output = filesystem.OutputFile(filesystem.new_path(destination.temporary_folder, destination.suffix), codec)
    try:
        yield output
        output.close()
        if destination.checkpoint_dir:
            filesystem.sync(output.path)
    except BaseException:
        output.abandon()
        raise


def _copy(source: pa.NativeFile, output: filesystem.OutputFile) -> None:
    while chunk := source.read(_CHUNK_BYTES):
        output.sink.write(chunk)


def _schema_of_files(destination: Destination, source: WrittenFile) -> pa.Schema:
    """Return the schema of a temporary file, which lacks the columns to partition by."""
    return pa.schema([f for f in source.schema if f.name not in destination.partition_by], source.schema.metadata)


def _header(destination: Destination, schema: pa.Schema, codec: str | None) -> pa.Buffer:
    buffer = pa.BufferOutputStream()
    sink = pa.CompressedOutputStream(buffer, codec) if codec else buffer
    encoder(destination, sink, schema).close()
    if codec:
        sink.close()
    return buffer.getvalue()


def _joined_columns(destination: Destination, sources: tuple[WrittenFile, ...]) -> str:
    """Read and write the rows again: the bytes of Parquet and Arrow files can't be concatenated."""
    schema = _schema_of_files(destination, sources[0])
    output = FileWriter(destination, "", schema)
    try:
        for source in sources:
            for batch in _batches(destination, source):
                output.add(batch.cast(schema) if batch.schema != schema else batch)
        return output.close(schema).path
    except BaseException:
        output.abandon()
        raise


def _batches(destination: Destination, source: WrittenFile) -> Iterator[pa.RecordBatch]:
    with filesystem.open_input(source.path) as file:
        if destination.format is Format.ARROW:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
        else:
            from pyarrow import parquet

            reader = parquet.ParquetFile(file)
            for number in range(reader.num_row_groups):
                yield from reader.read_row_group(number).to_batches()
