"""The socket between a worker and the agent of its node, through which blocks go. Imports no Beam: the agent has none.

A message has a kind, a text of JSON and data. The worker asks, and the agent answers each request that has an answer.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from enum import Enum
from typing import Any

from luminosity.errors import BlockLost

__all__ = ["BlockClient", "Kind", "receive", "send"]

_HEADER = struct.Struct("<cIQ")  # kind, bytes of the text, bytes of the data
_LONGEST_TEXT = 1 << 20
_TRANSFER_TIMEOUT_S = 120.0  # for one message to go through: the other side may be busy, but not silent


class Kind(Enum):
    """What a message is."""

    HELLO = b"h"  # the worker's id; no answer
    PUT = b"p"  # a block; the answer has its number
    GET = b"g"  # asks for elements of a block; the answer has them
    END = b"e"  # a bundle has ended; no answer
    ANSWER = b"a"
    FAILURE = b"f"  # the answer of an agent that can't do it, with the reason


def send(connection: socket.socket, kind: Kind, text: dict[str, Any], *parts: Any) -> None:
    """Send a message, whose data are the bytes of all parts."""
    encoded = json.dumps(text).encode()
    size = sum(len(memoryview(part).cast("B")) for part in parts)
    connection.sendall(_HEADER.pack(kind.value, len(encoded), size) + encoded)
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> tuple[Kind, dict[str, Any], bytearray]:
    """Receive a message. Raises :class:`ConnectionError` if the other side has closed the connection."""
    kind, length, size = _HEADER.unpack(_receive(connection, _HEADER.size))
    if length > _LONGEST_TEXT:
        raise ConnectionError(f"found a text of {length} bytes, expected at most {_LONGEST_TEXT}")
    return Kind(kind), json.loads(_receive(connection, length)), _receive(connection, size)


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise ConnectionError("the other side has closed the connection")
        rest = rest[count:]
    return data


class BlockClient:
    """The worker's side. Any thread may use it; each has a connection of its own, so that none waits for another."""

    def __init__(self, path: str, worker_id: str) -> None:
        self._path = path
        self._worker_id = worker_id
        self._own = threading.local()

    def put(self, data: bytes, ends: bytes) -> int:
        """Hand a block over, with where each element ends in it, as 64-bit integers. Returns the block's number.

        Waits while the agent holds too many blocks of this worker.
        """
        answer, _ = self._ask(Kind.PUT, {"ends": len(ends)}, ends, data)
        return int(answer["number"])

    def get(self, instruction_id: str, key: str, first: int, count: int) -> bytes:
        """Return ``count`` elements of a block from number ``first`` on. Raises :class:`BlockLost`."""
        request = {"instruction": instruction_id, "key": key, "first": first, "count": count}
        _, data = self._ask(Kind.GET, request)
        return bytes(data)

    def end(self, instruction_id: str) -> None:
        """Say that a bundle has ended, so that the agent lets go of the blocks that it read."""
        try:
            send(self._connection(), Kind.END, {"instruction": instruction_id})
        except OSError:
            self._drop()  # the agent has ended, and so will this worker

    def _ask(self, kind: Kind, text: dict[str, Any], *parts: bytes) -> tuple[dict[str, Any], bytearray]:
        try:
            connection = self._connection()
            send(connection, kind, text, *parts)
            select.select([connection], [], [])  # at the latest, the end of the agent closes the connection
            answer, found, data = receive(connection)
        except OSError as error:
            self._drop()  # a late answer must not be taken for that of the next request
            raise BlockLost(f"the agent of the node does not serve blocks: {error}") from error
        if answer is Kind.FAILURE:
            raise BlockLost(str(found["reason"]))
        return found, data

    def _connection(self) -> socket.socket:
        connection: socket.socket | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(_TRANSFER_TIMEOUT_S)
            connection.connect(self._path)
            send(connection, Kind.HELLO, {"worker": self._worker_id})
            self._own.connection = connection
        return connection

    def _drop(self) -> None:
        connection: socket.socket | None = getattr(self._own, "connection", None)
        self._own.connection = None
        if connection is not None:
            connection.close()
