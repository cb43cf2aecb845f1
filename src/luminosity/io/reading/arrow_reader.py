"""Arrow IPC: files, whose record batches can be read one by one, and streams, which are read from the start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from luminosity.io.reading.byte_ranges import ByteRange
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.open_file import open_bytes
from luminosity.io.reading.reader import Claim, Reader, claim_whole
from luminosity.io.reading.selection import Selection

__all__ = ["ArrowReader", "arrow_schema"]

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
