"""The data channel of workers in actors: large blocks are objects of the cluster, small ones travel in messages."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data import wire
from luminosity.engine.workers.sdk.channel import BlockChannel, BlockStream, BlockWriter
from luminosity.errors import BlockLost

__all__ = ["FedObjects", "FileChannel", "ObjectChannel", "OutgoingBlocks", "block_value", "file_writer", "span_of"]

INLINE_BYTES = 100 << 10  # below this, an object costs more than the bytes in the message, and Ray inlines it, too
_BLOCK_BYTES = 4 << 20  # an object has a fixed price of about a megabyte's copy
_OUTGOING_BYTES = 64 << 20  # of blocks that the driver has not taken yet; then the worker waits
_FEED_TIMEOUT_S = 120.0  # for the driver's call that names the objects of a bundle, which is on its way
_ENDED_BUNDLES = 1000  # remembered: a call that names objects is late by some bundles at most
_CHECK_EVERY_S = 1.0  # how often a wait looks whether its bundle was given up


def block_value(data: bytes, ends: Sequence[int]) -> tuple[Any, Any]:
    """Return a block as Ray stores it without another copy: the bytes, and where each element ends in them."""
    return np.frombuffer(data, np.uint8), np.asarray(ends, np.int64)


def span_of(value: tuple[Any, Any], first: int, count: int) -> bytes:
    """Return ``count`` elements from number ``first`` on.

    >>> span_of(block_value(b"aabbbc", [2, 5, 6]), 1, 2)
    b'bbbc'
    """
    data, ends = value
    start = int(ends[first - 1]) if first else 0
    return data[start : int(ends[first + count - 1])].tobytes()


class OutgoingBlocks:
    """Blocks that a worker has made and the driver has not taken yet. Any thread may use it."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[Any, Any]] = {}
        self._bytes = 0
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()

    def add(self, data: bytes, ends: Sequence[int]) -> int:
        """Keep a block until it is taken; return its number. Waits while too many bytes are kept."""
        value = block_value(data, ends)
        with self._changed:
            while self._bytes and self._bytes + len(data) > _OUTGOING_BYTES:
                self._changed.wait(_CHECK_EVERY_S)  # the driver takes every block that it has heard of
            number = next(self._numbers)
            self._blocks[number] = value
            self._bytes += len(data)
            return number

    def take(self, number: int) -> tuple[tuple[Any, Any], int]:
        """Remove and return a block, and its size."""
        with self._changed:
            value = self._blocks.pop(number)
            size = len(value[0])
            self._bytes -= size
            self._changed.notify_all()
        return value, size


class FedObjects:
    """The objects that running bundles read, as the driver names them. Any thread may use it."""

    def __init__(self, fetch: Callable[[Any], tuple[Any, Any]]) -> None:
        """``fetch`` gets what the driver has sent for one key."""
        self._fetch = fetch
        self._of_bundles: dict[str, dict[str, Any]] = {}
        self._ended: dict[str, None] = {}  # the last bundles that ended; a set with an order
        self._changed = threading.Condition()

    def feed(self, instruction_id: str, objects: dict[str, Any]) -> None:
        """Name the objects of a bundle."""
        with self._changed:
            if instruction_id not in self._ended:
                self._of_bundles.setdefault(instruction_id, {}).update(objects)
                self._changed.notify_all()

    def read(self, instruction_id: str, message: bytes, is_given_up: Callable[[], bool] | None = None) -> bytes:
        """Return the elements that a message refers to."""
        count, span = wire.unpack(message)
        if not isinstance(span, wire.ObjectSpan):
            return wire.read(message)
        return span_of(self._fetch(self._find(instruction_id, span.key, is_given_up)), span.first, count)

    def _find(self, instruction_id: str, key: str, is_given_up: Callable[[], bool] | None) -> Any:
        waited = 0.0
        with self._changed:
            while key not in (objects := self._of_bundles.get(instruction_id, {})):
                if waited >= _FEED_TIMEOUT_S or (is_given_up is not None and is_given_up()):
                    raise BlockLost(f"the driver has not named block {key} within {waited:.0f} s")
                self._changed.wait(_CHECK_EVERY_S)
                waited += _CHECK_EVERY_S
            return objects[key]

    def end(self, instruction_id: str) -> None:
        """Drop the objects of a bundle that has ended, so that the cluster can free them."""
        with self._changed:
            self._of_bundles.pop(instruction_id, None)
            self._ended[instruction_id] = None  # objects may be named after it: the call was on its way
            while len(self._ended) > _ENDED_BUNDLES:
                del self._ended[next(iter(self._ended))]


class _IndexedStream(BlockStream):
    """Collects elements like its base, and notes where each ends, so that the driver can cut the block unseen."""

    def __init__(
        self,
        send: Callable[[int, bytes, list[int]], None],
        close: Callable[[], None],
        *,
        is_eager: bool,
        block_bytes: int,
    ) -> None:
        self._ends: list[int] = []
        super().__init__(self._send_with_ends, close, is_eager=is_eager, block_bytes=block_bytes)
        self._send_block = send

    def _send_with_ends(self, count: int, data: bytes) -> None:
        ends, self._ends = self._ends, []
        self._send_block(count, data, ends)

    def maybe_flush(self) -> None:
        """Note where the element ends."""
        self._ends.append(self.size())
        super().maybe_flush()


class _ClusterChannel(BlockChannel):
    """What both channels have in common. The attributes are set on the class before the first channel is made."""

    read_by_driver: frozenset[str] = frozenset()  # outputs whose elements the driver itself reads

    def _stream(self, instruction_id: str, transform_id: str, message: Callable[[int, bytes, list[int]], bytes]) -> Any:
        def send(count: int, data: bytes, ends: list[int]) -> None:
            self._send(instruction_id, transform_id, message(count, data, ends))

        def close() -> None:
            self._send(instruction_id, transform_id, b"", is_last=True)

        is_eager = instruction_id.startswith(wire.SOURCE_PREFIX)
        return _IndexedStream(send, close, is_eager=is_eager, block_bytes=_BLOCK_BYTES)

    def _send(self, instruction_id: str, transform_id: str, data: bytes, *, is_last: bool = False) -> None:
        self._enqueue_to_send(
            beam_fn_api_pb2.Elements.Data(
                instruction_id=instruction_id, transform_id=transform_id, data=data, is_last=is_last
            )
        )


class ObjectChannel(_ClusterChannel):
    """Large blocks wait in ``outgoing`` for the driver, and are read from ``fed``."""

    worker_id: str
    outgoing: OutgoingBlocks
    fed: FedObjects

    def input_elements(
        self,
        instruction_id: str,
        expected_inputs: Collection[str | tuple[str, str]],
        abort_callback: Callable[[], bool] | None = None,
    ) -> Iterator[Any]:
        """Yield the blocks of a bundle's input, and let go of their objects at its end."""
        try:
            yield from super().input_elements(instruction_id, expected_inputs, abort_callback)
        finally:
            self.fed.end(instruction_id)

    def read(self, instruction_id: str, message: bytes, is_given_up: Callable[[], bool] | None) -> bytes:
        """Return the encoded elements of a message of a bundle."""
        return self.fed.read(instruction_id, message, is_given_up)

    def output_stream(self, instruction_id: str, transform_id: str) -> BlockStream:
        """Return the stream for the output of one transform in one bundle."""
        is_inline = transform_id in self.read_by_driver

        def message(count: int, data: bytes, ends: list[int]) -> bytes:
            if is_inline or len(data) < INLINE_BYTES:
                return wire.pack_bytes(count, data)
            key = f"{self.worker_id}.{self.outgoing.add(data, ends)}"
            return wire.pack_object(count, wire.ObjectSpan(key, 0, len(data)))

        return self._stream(instruction_id, transform_id, message)


class FileChannel(_ClusterChannel):
    """Blocks are files of a folder that all nodes see: that of the run's checkpoint."""

    def output_stream(self, instruction_id: str, transform_id: str) -> BlockStream:
        """Return the stream for the output of one transform in one bundle."""
        is_inline = transform_id in self.read_by_driver

        def message(count: int, data: bytes, ends: list[int]) -> bytes:
            return wire.pack_bytes(count, data) if is_inline else self.writer.message(count, data)

        return self._stream(instruction_id, transform_id, message)


def file_writer(folder: str, worker_id: str) -> BlockWriter:
    """Return the writer of a channel of files: compressed ones, since they go over a network."""
    return BlockWriter(folder, folder, _NoMemory(), worker_id)


class _NoMemory:
    """The quota of a worker that keeps no blocks in memory."""

    def reserve(self, size: int) -> bool:
        return False

    def give_back(self, size: int) -> None:
        raise AssertionError("nothing was reserved")
