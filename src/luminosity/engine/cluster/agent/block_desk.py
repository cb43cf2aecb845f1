"""The agent's side of the socket through which the workers of a node hand over blocks and get them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from luminosity.engine.cluster.agent.blocks import FedObjects, OutgoingBlocks, block_value, span_of
from luminosity.engine.cluster.worker.block_socket import Kind, receive, send
from luminosity.errors import BlockLost

__all__ = ["BlockDesk"]

_LOGGER = logging.getLogger(__name__)

_BACKLOG = 128  # connections that wait to be accepted; each thread of a worker makes one


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
