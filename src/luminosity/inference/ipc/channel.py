"""Python objects through a Unix socket; large arrays through shared memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

from luminosity.inference.ipc.logs import Logged, log_again
from luminosity.inference.ipc.pickling import pickled
from luminosity.inference.ipc.shared_memory import aligned, filled, mapped
from luminosity.inference.ipc.sockets import close_in_children

__all__ = ["Channel", "ConnectionClosed"]

_SHARE_ABOVE = 64 << 10  # bytes of buffers; below that a copy costs less than a mapping
_LARGEST_MESSAGE = 1 << 40  # a sanity check: who sends more speaks another language
_MOST_BUFFERS = 1 << 20
_HEADER = struct.Struct("<QQQ?")  # bytes of the pickle and of what was logged, buffers, are these in shared memory?
_CLOSED_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

_Parts = tuple[bytearray, bytearray, list[memoryview]]


class ConnectionClosed(ConnectionError):
    """The other process closed the connection, or died."""


class Channel:
    """One end of an authenticated connection. One thread may send while another one receives.

    What was written with `pickle` arrives as it was, except that numpy and pyarrow objects lie in memory that was
    mapped and not copied. All arrays of one message share one mapping, which is freed with the last of them.

    >>> here, there = (Channel(end) for end in socket.socketpair())
    >>> here.send({"rows": [1, 2]})
    >>> there.recv(timeout=1)
    {'rows': [1, 2]}
    >>> here.close()
    >>> there.recv()
    Traceback (most recent call last):
    luminosity.inference.ipc.channel.ConnectionClosed: the other process closed the connection
    >>> there.close()
    """

    def __init__(self, connection: socket.socket, take_logged: Callable[[], list[Logged]] = list) -> None:
        """``take_logged``: what the other side shall log, which travels with the next message."""
        self._connection = close_in_children(connection)
        self._connection.settimeout(None)
        self._take_logged = take_logged
        self._sending = threading.RLock()
        self._receiving = threading.RLock()

    def send(self, message: Any) -> None:
        """Returns when the message is on its way; waits where the other side does not receive.

        A message that can't be pickled raises as `pickle` does, and the channel remains usable.
        """
        data, buffers = pickled(message)
        views = [buffer.raw() for buffer in buffers]
        size = sum(view.nbytes for view in views)
        _check_size(len(data) + size, len(views))
        descriptors = [filled(views)] if size > _SHARE_ABOVE else []
        try:
            logged = self._take_logged()
            self._send_parts(data, pickle.dumps(logged) if logged else b"", views, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def recv(self, timeout: float | None = None) -> Any:
        """The next message; `TimeoutError` where none begins within ``timeout`` seconds.

        Without a timeout, the end of the other process or `close` in another thread ends the wait. A message that
        can't be unpickled raises what `pickle` does, and the channel remains usable.
        """
        with self._receiving:
            data, logged, buffers = self._recv_parts(timeout)
        if logged:
            log_again(pickle.loads(logged))
        return pickle.loads(data, buffers=buffers)

    def close(self) -> None:
        """Whoever sends or receives in another thread gets `ConnectionClosed`."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._sending, self._receiving:  # so that nobody uses the descriptor, whose number may be given anew
            self._connection.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _whole_messages(self) -> Generator[None]:
        """After half a message nobody could tell where the next one begins."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            if isinstance(error, OSError) and not isinstance(error, ConnectionClosed):
                raise ConnectionClosed(f"the connection is closed: {error.strerror or error}") from error
            raise

    def _send_parts(self, pickled: bytes, logged: bytes, views: list[memoryview], descriptors: list[int]) -> None:
        head = _HEADER.pack(len(pickled), len(logged), len(views), bool(descriptors))
        head += struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
        with self._sending, self._whole_messages():
            sent = socket.send_fds(self._connection, [head], descriptors) if descriptors else 0
            for part in _joined([head[sent:], pickled, logged, *(() if descriptors else views)]):
                self._connection.sendall(part)

    def _recv_parts(self, timeout: float | None) -> _Parts:
        self._wait(timeout)
        descriptors: list[int] = []
        try:
            with self._whole_messages():
                return self._recv_rest(descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _wait(self, timeout: float | None) -> None:
        if timeout is None:
            return
        if self._connection.fileno() < 0:
            raise ConnectionClosed("the connection is closed")
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(timeout * 1000):
            raise TimeoutError(f"no message within {timeout:g} s")

    def _recv_rest(self, descriptors: list[int]) -> _Parts:
        length, length_of_logged, count, is_shared = _HEADER.unpack(self._recv_header(descriptors))
        _check_size(length + length_of_logged, count)
        sizes = struct.unpack(f"<{count}Q", self._recv_exactly(8 * count))
        _check_size(length + sum(sizes), count)
        pickled, logged = self._recv_exactly(length), self._recv_exactly(length_of_logged)
        if is_shared != bool(descriptors):
            raise ConnectionClosed("a message came without its shared memory, or with some that it did not announce")
        if is_shared:
            return pickled, logged, _cut(mapped(descriptors[0], sum(map(aligned, sizes))), sizes)
        return pickled, logged, [memoryview(self._recv_exactly(size)) for size in sizes]

    def _recv_header(self, descriptors: list[int]) -> bytes:
        """A descriptor comes with the first byte; whatever is read here is only ever the header."""
        header = b""
        while len(header) < _HEADER.size:
            data, came, _, _ = socket.recv_fds(self._connection, _HEADER.size - len(header), 1, _CLOSED_ON_EXEC)
            for descriptor in came:
                descriptors.append(descriptor)
                os.set_inheritable(descriptor, False)
            if not data:
                raise ConnectionClosed("the other process closed the connection")
            header += data
        return header

    def _recv_exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            received = self._connection.recv_into(left)
            if not received:
                raise ConnectionClosed("the other process ended in the midst of a message")
            left = left[received:]
        return data


def _joined(parts: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """One where they are small; and never an empty one, which could only fail: the other side has all it wants."""
    if sum(len(part) for part in parts) <= _SHARE_ABOVE:
        return [b"".join(parts)]
    return [part for part in parts if len(part)]


def _cut(memory: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    buffers: list[memoryview] = []
    begin = 0
    for size in sizes:
        buffers.append(memory[begin : begin + size])
        begin += aligned(size)
    return buffers


def _check_size(size: int, count: int) -> None:
    if size > _LARGEST_MESSAGE or count > _MOST_BUFFERS:
        raise ValueError(
            f"a message of {size} bytes in {count} buffers; expected at most {_LARGEST_MESSAGE} bytes in "
            f"{_MOST_BUFFERS} buffers: send less at once"
        )
