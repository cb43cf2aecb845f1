"""How a record batch travels: as an Arrow IPC stream, which is read without copying."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from apache_beam import coders
from apache_beam.coders import coder_impl

__all__ = ["RecordBatchCoder", "register"]


class RecordBatchCoder(coders.Coder):
    """Schema and rows together, so that every element can be read alone. Of a slice only its rows travel.

    >>> coder = RecordBatchCoder()
    >>> batch = pa.record_batch({"text": ["a", None]})
    >>> coder.decode(coder.encode(batch)).equals(batch)
    True
    """

    def _create_impl(self) -> coder_impl.CallbackCoderImpl:
        return coder_impl.CallbackCoderImpl(self.encode, self.decode, self.estimate_size)

    def encode(self, value: pa.RecordBatch) -> bytes:
        if not isinstance(value, pa.RecordBatch):
            raise TypeError(
                f"found an element of type {type(value).__name__}, expected a pyarrow.RecordBatch; "
                "TableFromRows() makes them of dicts, Beam Rows and dataclasses"
            )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, value.schema) as writer:
            writer.write_batch(value)
        return sink.getvalue().to_pybytes()

    def decode(self, encoded: bytes) -> pa.RecordBatch:
        with pa.ipc.open_stream(encoded) as reader:
            return reader.read_next_batch()

    def estimate_size(self, value: pa.RecordBatch) -> int:
        try:
            return int(value.nbytes)
        except pa.ArrowTypeError:  # Older Arrow can't tell what part of its buffers a view of texts uses.
            return int(value.get_total_buffer_size())

    def is_deterministic(self) -> bool:
        return False  # The same rows may lie in memory in more than one way.

    def to_type_hint(self) -> Any:
        return pa.RecordBatch

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


def register() -> None:
    """Make it the coder of every collection whose type is `pyarrow.RecordBatch`."""
    coders.registry.register_coder(pa.RecordBatch, RecordBatchCoder)
