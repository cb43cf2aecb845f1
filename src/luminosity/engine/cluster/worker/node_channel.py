"""The data channels of workers on a cluster: large blocks go to the node's agent or into a shared folder."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar

from luminosity.engine.cluster.worker.block_socket import BlockClient
from luminosity.engine.data import wire
from luminosity.engine.workers.sdk.channel import BlockChannel, BlockStream, BlockWriter, Part

__all__ = ["FileChannel", "ObjectChannel", "file_writer"]

INLINE_BYTES = 100 << 10  # below this, an object costs more than the bytes in the message, and Ray inlines it, too
_BLOCK_BYTES = 4 << 20  # an object has a fixed price of about a megabyte's copy


class _IndexedStream(BlockStream):
    """Collects elements like its base, and notes where each ends, so that the driver can cut the block unseen."""

    def __init__(
        self,
        send: Callable[[int, bytes, bytes], None],
        close: Callable[[], None],
        *,
        is_eager: bool,
        block_bytes: int,
    ) -> None:
        self._ends = array("q")
        super().__init__(self._send_with_ends, close, is_eager=is_eager, block_bytes=block_bytes)
        self._send_block = send

    def _send_with_ends(self, count: int, data: bytes) -> None:
        ends, self._ends = self._ends, array("q")
        self._send_block(count, data, ends.tobytes())

    def add_parts(self, parts: Collection[Part]) -> None:
        """Add an element whose encoding has several parts."""
        self.write(b"".join(parts))
        self.maybe_flush()

    def maybe_flush(self) -> None:
        """Note where the element ends."""
        self._ends.append(self.size())
        super().maybe_flush()


class _ClusterChannel(BlockChannel):
    """What both channels have in common. The attributes are set on the class before the first channel is made."""

    read_by_driver: frozenset[str] = frozenset()  # outputs whose elements the driver itself reads

    def _stream(self, instruction_id: str, transform_id: str, message: Callable[[int, bytes, bytes], bytes]) -> Any:
        return _IndexedStream(
            lambda count, data, ends: self.send_data(instruction_id, transform_id, message(count, data, ends)),
            lambda: self.send_data(instruction_id, transform_id, is_last=True),
            is_eager=instruction_id.startswith(wire.SOURCE_PREFIX),
            block_bytes=_BLOCK_BYTES,
        )


class ObjectChannel(_ClusterChannel):
    """Large blocks are objects of the cluster, which the node's agent stores and fetches."""

    worker_id: str
    agent: BlockClient
    _reading: ClassVar[set[str]] = set()  # bundles that have read objects

    def input_elements(
        self,
        instruction_id: str,
        expected_inputs: Collection[str | tuple[str, str]],
        abort_callback: Callable[[], bool] | None = None,
    ) -> Iterator[Any]:
        """Yield the blocks of a bundle's input, and let go of their objects at its end."""
        is_whole = False
        try:
            yield from super().input_elements(instruction_id, expected_inputs, abort_callback)
            is_whole = True
        finally:
            # A bundle that ends early may have objects of which it has not heard yet.
            if not is_whole or instruction_id in self._reading:
                self._reading.discard(instruction_id)
                self.agent.end(instruction_id)

    def read(self, instruction_id: str, message: bytes) -> bytes:
        """Return the encoded elements of a message of a bundle."""
        count, span = wire.unpack(message)
        if not isinstance(span, wire.ObjectSpan):
            return wire.read(message)
        self._reading.add(instruction_id)
        return self.agent.get(instruction_id, span.key, span.first, count)

    def output_stream(self, instruction_id: str, transform_id: str) -> BlockStream:
        """Return the stream for the output of one transform in one bundle."""
        is_inline = transform_id in self.read_by_driver

        def message(count: int, data: bytes, ends: bytes) -> bytes:
            if is_inline or len(data) < INLINE_BYTES:
                return wire.pack_bytes(count, data)
            key = f"{self.worker_id}.{self.agent.put(data, ends)}"
            return wire.pack_object(count, wire.ObjectSpan(key, 0, len(data)))

        return self._stream(instruction_id, transform_id, message)


class FileChannel(_ClusterChannel):
    """Blocks are files of a folder that all nodes see: that of the run's checkpoint."""

    def output_stream(self, instruction_id: str, transform_id: str) -> BlockStream:
        """Return the stream for the output of one transform in one bundle."""
        is_inline = transform_id in self.read_by_driver

        def message(count: int, data: bytes, ends: bytes) -> bytes:
            return wire.pack_bytes(count, data) if is_inline else self.writer.message(count, data)

        return self._stream(instruction_id, transform_id, message)


def file_writer(folder: str, worker_id: str) -> BlockWriter:
    """Return the writer of a channel of files: compressed ones, since they go over a network."""
    return BlockWriter(folder, folder, _NoMemory(), worker_id)


class _NoMemory:
    """The quota of a worker that keeps no blocks in memory."""

    limit = 0

    def reserve(self, size: int, part: float = 1.0) -> bool:
        return False

    def give_back(self, size: int) -> None:
        raise AssertionError("nothing was reserved")
