"""The coder of record batches: Arrow IPC streams, which are read without copying."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from apache_beam import coders

from luminosity.errors import Fix, InvalidType

__all__ = ["RecordBatchCoder", "register"]


class RecordBatchCoder(coders.Coder):
    """Encodes the schema with the rows, so that every element can be read alone. A slice is encoded without its rest.

    >>> coder = RecordBatchCoder()
    >>> batch = pa.record_batch({"text": ["a", None]})
    >>> coder.decode(coder.encode(batch)).equals(batch)
    True
    """

    def encode(self, value: pa.RecordBatch) -> bytes:
        """Write the batch, with its schema, as an Arrow IPC stream."""
        if not isinstance(value, pa.RecordBatch):
            raise InvalidType(
                f"found an element of type {type(value).__name__}, expected a pyarrow.RecordBatch",
                fix=Fix("apply TableFromRows() first, which makes them from dicts, Beam Rows and dataclasses"),
            )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, value.schema) as writer:
            writer.write_batch(value)
        return sink.getvalue().to_pybytes()

    def decode(self, encoded: bytes) -> pa.RecordBatch:
        """Read the batch from its Arrow IPC stream, without copying the columns."""
        with pa.ipc.open_stream(encoded) as reader:
            return reader.read_next_batch()

    def estimate_size(self, value: pa.RecordBatch) -> int:
        """Return the bytes of the batch's columns, without encoding them."""
        try:
            return int(value.nbytes)
        except pa.ArrowTypeError:  # Older Arrow does not know which part of its buffers a column of string views uses.
            return int(value.get_total_buffer_size())

    def to_type_hint(self) -> Any:
        """Return ``pyarrow.RecordBatch``, the type of the elements."""
        return pa.RecordBatch


def register() -> None:
    """Make it the coder of every PCollection of type ``pyarrow.RecordBatch``."""
    coders.registry.register_coder(pa.RecordBatch, RecordBatchCoder)
