"""The final files of a table: their names, and how several temporary files become one."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from luminosity.io.formats import Format
from luminosity.io.writing import filesystem
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.encoders import encoder
from luminosity.io.writing.file_writer import FileWriter, WrittenFile

__all__ = ["Move", "final_names", "joined"]

_CHUNK_BYTES = 4 << 20  # copied at once: more would not be faster


class Move(NamedTuple):
    """Temporary files that become one final file; several are joined."""

    sources: tuple[WrittenFile, ...]
    final: str


def final_names(destination: Destination, written: list[WrittenFile]) -> list[Move]:
    """Return the final files. The result depends only on ``written``, so that a retry comes to the same names."""
    with_rows = [file for file in written if file.rows] or written[:1]
    with_rows.sort(key=lambda file: (file.partition, file.path))
    if destination.is_one_file:
        return [Move(tuple(with_rows), destination.path)] if with_rows else []
    # A run that appends needs names that no other run gives.
    mark = f"-{_digest(with_rows)}" if destination.if_exists == "append" else ""
    counts = Counter(file.partition for file in with_rows)
    numbers: Counter[str] = Counter()
    moves: list[Move] = []
    for file in with_rows:
        name = f"part-{numbers[file.partition]:05}-of-{counts[file.partition]:05}{mark}{destination.suffix}"
        numbers[file.partition] += 1
        moves.append(Move((file,), filesystem.join(destination.path, file.partition, name)))
    return moves


def _digest(written: list[WrittenFile]) -> str:
    return hashlib.sha256("\n".join(file.path for file in written).encode()).hexdigest()[:12]


def joined(destination: Destination, sources: tuple[WrittenFile, ...]) -> str:
    """Return the path of a temporary file with all rows of the sources."""
    lacks_header = destination.is_one_file and destination.format.is_csv
    if len(sources) == 1 and not lacks_header:
        return sources[0].path
    if destination.format.is_text:
        return _joined_text(destination, sources)
    return _joined_columns(destination, sources)


def _joined_text(destination: Destination, sources: tuple[WrittenFile, ...]) -> str:
    """Concatenate text. Compressed streams can be concatenated too: all readers accept them."""
    output = filesystem.OutputFile(filesystem.new_path(destination.temporary_folder, destination.suffix), None)
    try:
        if destination.format.is_csv:
            output.sink.write(_header(destination, sources[0].schema))
        for source in sources:
            with filesystem.open_input(source.path) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    output.sink.write(chunk)
        output.close()
    except BaseException:
        output.abandon()
        raise
    return output.path


def _header(destination: Destination, schema: pa.Schema) -> pa.Buffer:
    buffer = pa.BufferOutputStream()
    codec = destination.whole_file_compression
    sink = pa.CompressedOutputStream(buffer, codec) if codec else buffer
    encoder(destination, sink, schema).close()
    if codec:
        sink.close()
    return buffer.getvalue()


def _joined_columns(destination: Destination, sources: tuple[WrittenFile, ...]) -> str:
    """Read and write the rows again: the bytes of Parquet and Arrow files can't be concatenated."""
    schema = sources[0].schema
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
