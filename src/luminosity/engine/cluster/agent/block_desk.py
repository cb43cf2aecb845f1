"""Blocks in the agent of a node: those that its workers have made, and those that they will read.

They go over a socket, whose other side is ``worker/block_socket.py``, and lie in Ray's object store. Waits for
an object end after their time, and at once when nothing waits for the object any more.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from luminosity.engine.cluster.worker.block_socket import Kind, receive, send
from luminosity.errors import BlockLost

__all__ = ["LAST_READ_S", "BlockDesk", "RayStore", "Store", "block_value", "read_first", "span_of"]

LAST_READ_S = 60.0  # for the last copy of an object: a busy node needs long to read what it has spilled
_READ_S = 5.0  # for one copy, if there is another: its node may be gone without a word
_LOOK_EVERY_S = 0.2  # how often a wait for an object looks whether it is over
_LOGGER = logging.getLogger(__name__)
_OUTGOING_BYTES = 64 << 20  # of a worker's blocks that the driver has not taken yet; then the worker waits
_FEED_TIMEOUT_S = 120.0  # for the driver's call that names the objects of a bundle, which is on its way
_ENDED_BUNDLES = 1000  # remembered: a call that names objects is late by some bundles at most
_CHECK_EVERY_S = 1.0  # how often a wait for the driver looks whether it is over
_BACKLOG = 128  # connections that wait to be accepted; each thread of a worker makes one


class Store(Protocol):
    """Where objects lie."""

    def get(self, reference: Any, seconds: float, is_over: Callable[[], bool]) -> Any:
        """Return an object. Raises :class:`BlockLost` if it is not there in time, or if ``is_over`` says so."""
        ...

    def put(self, value: Any) -> Any:
        """Store an object on this process's node; return the reference."""
        ...


def read_first(copies: Sequence[Any], read: Callable[[Any, float], Any]) -> Any:
    """Return the first of the copies of an object that can be read: ``read`` gets a reference and the seconds for it.

    Raises :class:`BlockLost` if all fail with it.
    """
    failure: BlockLost | None = None
    for number, reference in enumerate(copies, 1):
        try:
            return read(reference, _READ_S if number < len(copies) else LAST_READ_S)
        except BlockLost as error:
            failure = error
    reason = failure.message if failure is not None else "there is none"
    raise BlockLost(f"found none of the {len(copies)} copies of a block: {reason}") from failure


class RayStore:
    """The store of the cluster to which this process is connected."""

    def get(self, reference: Any, seconds: float, is_over: Callable[[], bool]) -> Any:
        """Return an object. Raises :class:`BlockLost` if it is not there in time, or if ``is_over`` says so."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        deadline = time.monotonic() + seconds
        while True:
            try:
                return ray.get(reference, timeout=max(0.0, min(_LOOK_EVERY_S, deadline - time.monotonic())))
            except GetTimeoutError as error:
                if is_over():
                    raise BlockLost("nothing waits for the object any more") from error
                if time.monotonic() >= deadline:
                    raise BlockLost(f"an object is not there after {seconds:.0f} s") from error
            except RayError as error:
                first, *_ = f"{error}".strip().splitlines() or [""]
                raise BlockLost(f"{type(error).__name__}: {first}") from error

    def put(self, value: Any) -> Any:
        """Store an object on this process's node; return the reference."""
        import ray
        from ray.exceptions import RayError

        try:
            return ray.put(value)
        except RayError as error:
            raise BlockLost(f"{type(error).__name__}: the driver's node can't hold a copy of a block") from error


def block_value(data: Any, ends: Any) -> tuple[Any, Any]:
    """Return a block as Ray stores it without another copy: the bytes, and where each element ends in them."""
    return np.frombuffer(data, np.uint8), np.frombuffer(ends, np.int64)


def span_of(value: tuple[Any, Any], first: int, count: int) -> Any:
    """Return ``count`` elements from number ``first`` on, as a view of the block.

    >>> from array import array
    >>> bytes(span_of(block_value(b"aabbbc", array("q", [2, 5, 6])), 1, 2))
    b'bbbc'
    """
    data, ends = value
    start = int(ends[first - 1]) if first else 0
    return data[start : int(ends[first + count - 1])]


class OutgoingBlocks:
    """Blocks that a worker has made and the driver has not taken yet. Any thread may use it."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[Any, Any]] = {}
        self._bytes = 0
        self._numbers = itertools.count(1)
        self._is_closed = False
        self._changed = threading.Condition()

    def add(self, value: tuple[Any, Any]) -> int:
        """Keep a block until it is taken; return its number. Waits while too many bytes are kept."""
        size = len(value[0])
        with self._changed:
            while self._bytes and self._bytes + size > _OUTGOING_BYTES and not self._is_closed:
                self._changed.wait(_CHECK_EVERY_S)  # the driver takes every block that it has heard of
            if self._is_closed:
                raise BlockLost("the worker was given up")
            number = next(self._numbers)
            self._blocks[number] = value
            self._bytes += size
            return number

    def take(self, number: int) -> tuple[tuple[Any, Any], int]:
        """Remove and return a block, and its size."""
        with self._changed:
            value = self._blocks.pop(number)
            size = len(value[0])
            self._bytes -= size
            self._changed.notify_all()
        return value, size

    def close(self) -> None:
        """Drop all blocks."""
        with self._changed:
            self._is_closed = True
            self._blocks.clear()
            self._changed.notify_all()


class FedObjects:
    """The objects that the running bundles of a worker read, as the driver names them. Any thread may use it."""

    def __init__(self) -> None:
        self._of_bundles: dict[str, dict[str, Any]] = {}
        self._ended: dict[str, None] = {}  # the last bundles that ended; a set with an order
        self._is_closed = False
        self._changed = threading.Condition()

    def feed(self, instruction_id: str, objects: dict[str, Any]) -> None:
        """Name the objects of a bundle."""
        with self._changed:
            if instruction_id not in self._ended and not self._is_closed:
                self._of_bundles.setdefault(instruction_id, {}).update(objects)
                self._changed.notify_all()

    def find(self, instruction_id: str, key: str) -> Any:
        """Return what the driver has sent for a key. Waits for it; raises :class:`BlockLost`."""
        waited = 0.0
        with self._changed:
            while key not in (objects := self._of_bundles.get(instruction_id, {})):
                if waited >= _FEED_TIMEOUT_S or self._is_closed:
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

    def close(self) -> None:
        """Drop all objects."""
        with self._changed:
            self._is_closed = True
            self._of_bundles.clear()
            self._changed.notify_all()


@dataclass
class _Worker:
    """What the desk has for one worker."""

    outgoing: OutgoingBlocks = field(default_factory=OutgoingBlocks)
    fed: FedObjects = field(default_factory=FedObjects)
    connections: set[socket.socket] = field(default_factory=set[socket.socket])


class BlockDesk:
    """Serves the workers of one node. Only processes of this user reach its socket, which lies in a private folder."""

    def __init__(self, path: str, fetch: Callable[[Any], tuple[Any, Any]]) -> None:
        """``fetch`` gets what the driver has sent for one key, and returns the block."""
        self.path = path
        self._fetch = fetch
        self._workers: dict[str, _Worker] = {}
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(_BACKLOG)
        threading.Thread(target=self._accept, name="luminosity-blocks", daemon=True).start()

    def expect(self, worker_id: str) -> None:
        """Let a worker connect."""
        with self._lock:
            self._workers.setdefault(worker_id, _Worker())

    def take(self, worker_id: str, number: int) -> tuple[tuple[Any, Any], int]:
        """Remove and return a block of a worker, and its size."""
        return self._workers[worker_id].outgoing.take(number)

    def feed(self, worker_id: str, instruction_id: str, objects: dict[str, Any]) -> None:
        """Name the objects of a worker's bundle."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.fed.feed(instruction_id, objects)

    def ended(self, worker_id: str) -> None:
        """Drop what a worker that has ended would have read. What it has made stays until it is forgotten."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.fed.close()

    def forget(self, worker_id: str) -> None:
        """Drop everything of a worker."""
        with self._lock:
            worker = self._workers.pop(worker_id, None)
        if worker is not None:
            worker.fed.close()
            worker.outgoing.close()
            for connection in list(worker.connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Serve nobody any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for worker_id in list(self._workers):
            self.forget(worker_id)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # it was closed
            threading.Thread(
                target=self._serve, args=(connection,), name="luminosity-blocks-of-worker", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            worker: _Worker | None = None
            try:
                kind, text, _ = receive(connection)
                with self._lock:
                    worker = self._workers.get(str(text.get("worker"))) if kind is Kind.HELLO else None
                    if worker is None:
                        return  # a worker that was given up
                    worker.connections.add(connection)
                while True:
                    self._answer(connection, worker, *receive(connection))
            except (OSError, ValueError) as error:
                _LOGGER.debug("a worker's connection for blocks has ended: %r", error)
            finally:
                if worker is not None:
                    with self._lock:
                        worker.connections.discard(connection)

    def _answer(
        self, connection: socket.socket, worker: _Worker, kind: Kind, text: dict[str, Any], data: bytearray
    ) -> None:
        if kind is Kind.END:
            worker.fed.end(text["instruction"])
            return
        try:
            if kind is Kind.PUT:
                ends = memoryview(data)[: text["ends"]]
                answer, parts = {"number": worker.outgoing.add(block_value(memoryview(data)[text["ends"] :], ends))}, ()
            else:
                block = self._fetch(worker.fed.find(text["instruction"], text["key"]))
                answer, parts = dict[str, Any](), (span_of(block, text["first"], text["count"]),)
        except BlockLost as error:
            send(connection, Kind.FAILURE, {"reason": error.message})
        else:
            send(connection, Kind.ANSWER, answer, *parts)
