"""One file of several: what each worker wrote, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from luminosity.io.formats import Format
from luminosity.io.writing import files
from luminosity.io.writing.encoders import encoder
from luminosity.io.writing.table_file import TableFile, Written
from luminosity.io.writing.target import Target

__all__ = ["joined"]

_CHUNK_BYTES = 4 << 20


def joined(target: Target, sources: tuple[Written, ...]) -> str:
    """The path of a temporary file with all their rows."""
    if len(sources) == 1 and target.format is not Format.CSV:
        return sources[0].path
    if target.format in (Format.CSV, Format.JSON_LINES):
        return _joined_text(target, sources)
    return _joined_columns(target, sources)


def _joined_text(target: Target, sources: tuple[Written, ...]) -> str:
    """Lines follow on lines; where they are compressed, as one stream on another, which all readers know."""
    output = files.OutputFile(files.new_path(target.temporary_folder, target.suffix), None)
    try:
        if target.format is Format.CSV:
            output.sink.write(_header(target, sources[0].schema))
        for source in sources:
            with files.open_input(source.path) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    output.sink.write(chunk)
        output.close()
    except BaseException:
        output.abandon()
        raise
    return output.path


def _header(target: Target, schema: pa.Schema) -> pa.Buffer:
    buffer = pa.BufferOutputStream()
    codec = target.whole_file_compression
    sink = pa.CompressedOutputStream(buffer, codec) if codec else buffer
    encoder(target, sink, schema).close()
    if codec:
        sink.close()
    return buffer.getvalue()


def _joined_columns(target: Target, sources: tuple[Written, ...]) -> str:
    """Read and written again: neither Parquet nor Arrow files can be put together from bytes."""
    schema = sources[0].schema
    output = TableFile(target, "", schema)
    try:
        for source in sources:
            for batch in _batches(target, source):
                output.add(batch.cast(schema) if batch.schema != schema else batch)
        return output.close(schema).path
    except BaseException:
        output.abandon()
        raise


def _batches(target: Target, source: Written) -> Iterator[pa.RecordBatch]:
    with files.open_input(source.path) as file:
        if target.format is Format.ARROW:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
        else:
            from pyarrow import parquet

            reader = parquet.ParquetFile(file)
            for number in range(reader.num_row_groups):
                yield from reader.read_row_group(number).to_batches()
