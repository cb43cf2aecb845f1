"""A channel: sends Python objects through a Unix socket, and their large arrays through shared memory.

Warnings of the serving process travel with its messages to clients, which log them again.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import mmap
import os
import pickle
import select
import socket
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from luminosity.errors import InvalidArgument
from luminosity.inference.ipc.pickling import pickle_with_buffers
from luminosity.inference.ipc.sockets import close_in_children, peer_pid

__all__ = ["Channel", "ConnectionClosed", "LogCollector", "LogValues", "log_again"]

LogValues = dict[str, Any]
"""A log record as plain values, which can be pickled."""
_CARRIED = (
    "name",
    "levelno",
    "levelname",
    "pathname",
    "filename",
    "module",
    "lineno",
    "funcName",
    "created",
    "process",
)
_MOST_RECORDS = 1000  # the oldest are lost if no client takes them
_SHARE_ABOVE = 64 << 10  # bytes of buffers; copying less is cheaper than a mapping
_LARGEST_MESSAGE = 1 << 40  # bytes; a larger number means that the other side speaks another protocol
_MOST_BUFFERS = 1 << 20  # likewise
_HEADER = struct.Struct("<QQQ?")  # bytes of the pickle, bytes of log records, number of buffers, are these shared?
_CLOSED_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_Parts = tuple[bytearray, bytearray, list[memoryview]]


class ConnectionClosed(ConnectionError):
    """The other process closed the connection, or died."""


class Channel:
    """One end of an authenticated connection. One thread may send while another receives.

    Messages are pickled. The data of numpy and pyarrow objects is mapped from shared memory, not copied. All arrays of
    one message share one mapping, which is freed with the last of them.

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

    def __init__(self, connection: socket.socket, take_log_values: Callable[[], list[LogValues]] = list) -> None:
        """``take_log_values`` returns log records for the other side; they travel with the next message."""
        self._connection = close_in_children(connection)
        self._connection.settimeout(None)
        self._take_log_values = take_log_values
        self._sending = threading.RLock()
        self._receiving = threading.RLock()

    def send(self, message: Any) -> None:
        """Send a message; block while the other side does not receive.

        Raises what ``pickle`` raises for a message that can't be pickled; the channel remains usable. Raises
        :class:`ConnectionClosed` if the other side is gone.
        """
        data, buffers = pickle_with_buffers(message)
        views = [buffer.raw() for buffer in buffers]
        size = sum(view.nbytes for view in views)
        _check_size(len(data) + size, len(views))
        descriptors = [fill_memory(views)] if size > _SHARE_ABOVE else []
        try:
            logged = self._take_log_values()
            self._send_parts(data, pickle.dumps(logged) if logged else b"", views, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def recv(self, timeout: float | None = None) -> Any:
        """Block until a message arrives, and return it. Raises ``TimeoutError`` after ``timeout`` seconds.

        Raises :class:`ConnectionClosed` if the other process ends, or another thread closes the channel. Raises what
        ``pickle`` raises for a message that can't be unpickled; the channel remains usable.
        """
        with self._receiving:
            data, logged, buffers = self._recv_parts(timeout)
        if logged:
            log_again(pickle.loads(logged))
        return pickle.loads(data, buffers=buffers)

    def peer_pid(self) -> int:
        """Return the id of the process at the other end; 0 if the system can't tell."""
        return peer_pid(self._connection)

    def close(self) -> None:
        """Close the channel; a thread that sends or receives meanwhile gets :class:`ConnectionClosed`."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._sending, self._receiving:  # No thread may use the descriptor: the system reuses its number.
            self._connection.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _whole_messages(self) -> Generator[None]:
        """Shut the connection down on an error: after half a message, the next one can't be found."""
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
            raise ConnectionClosed("found a message whose shared memory is missing or was not announced")
        if is_shared:
            return pickled, logged, _cut(map_memory(descriptors[0], sum(map(align, sizes))), sizes)
        return pickled, logged, [memoryview(self._recv_exactly(size)) for size in sizes]

    def _recv_header(self, descriptors: list[int]) -> bytes:
        """Receive exactly the header; a descriptor comes with its first byte."""
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
                raise ConnectionClosed("the other process ended in the middle of a message")
            left = left[received:]
        return data


def _joined(parts: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """Join small parts into one; leave out empty ones, whose sending could fail after the other side has read all."""
    if sum(len(part) for part in parts) <= _SHARE_ABOVE:
        return [b"".join(parts)]
    return [part for part in parts if len(part)]


def _cut(memory: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    buffers: list[memoryview] = []
    begin = 0
    for size in sizes:
        buffers.append(memory[begin : begin + size])
        begin += align(size)
    return buffers


def _check_size(size: int, count: int) -> None:
    if size > _LARGEST_MESSAGE or count > _MOST_BUFFERS:
        raise InvalidArgument(
            f"found a message of {size} bytes in {count} buffers, expected at most {_LARGEST_MESSAGE} bytes in "
            f"{_MOST_BUFFERS} buffers",
            fix="send less at once",
        )


_ALIGNMENT = 64  # bytes; pyarrow recommends it for the beginning of each buffer, and numpy needs less
_FAILED = ctypes.c_void_p(-1).value
_WRITE_BYTES = 1 << 30  # the kernel writes at most 2 GiB at once
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def align(size: int) -> int:
    """Return the size rounded up to where the next buffer may begin.

    >>> align(0), align(1), align(64)
    (0, 64, 64)
    """
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def fill_memory(buffers: Sequence[memoryview]) -> int:
    """Copy the buffers, each aligned, into new memory and return its descriptor, which the caller closes."""
    descriptor = _new()
    try:
        os.ftruncate(descriptor, sum(align(buffer.nbytes) for buffer in buffers))
        offset = 0
        for buffer in buffers:
            _write(descriptor, buffer, offset)
            offset += align(buffer.nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_memory(descriptor: int, size: int) -> memoryview:
    """Map the memory behind the descriptor, which the caller closes; it is freed with the last view of it.

    Python's own ``mmap`` keeps a descriptor open for each mapping, and a process may have only about a thousand. The
    mapping is shared, not copied on write: the sender does not use the memory any more.
    """
    if (found := os.fstat(descriptor).st_size) < size:
        raise InvalidArgument(f"found {found} bytes of shared memory, expected {size}")
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"can't map {size} bytes of shared memory: {os.strerror(code)}")
    array = (ctypes.c_char * size).from_address(address)
    weakref.finalize(array, _libc.munmap, address, size).atexit = False
    return memoryview(array).cast("B")


def _new() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("luminosity")  # closed on exec
    descriptor, path = tempfile.mkstemp(prefix="luminosity-")
    os.unlink(path)
    return descriptor


def _write(descriptor: int, buffer: memoryview, offset: int) -> None:
    while buffer.nbytes:
        written = os.pwrite(descriptor, buffer[:_WRITE_BYTES], offset)
        buffer, offset = buffer[written:], offset + written


class LogCollector(logging.Handler):
    """Keeps warnings until a message takes them to a client, which logs them again; the oldest may be lost."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: collections.deque[LogValues] = collections.deque(maxlen=_MOST_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        try:
            carried = {name: getattr(record, name) for name in _CARRIED}
            self._kept.append({**carried, "msg": self.format(record)})  # includes the traceback
        except Exception:
            self.handleError(record)

    def take(self) -> list[LogValues]:
        """Return the records that no client has taken yet; may be called from any thread."""
        taken: list[LogValues] = []
        with contextlib.suppress(IndexError):
            while len(taken) < _MOST_RECORDS:
                taken.append(self._kept.popleft())
        return taken


def log_again(records: list[LogValues]) -> None:
    """Log records of the serving process in this process."""
    for values in records:
        logger = logging.getLogger(values["name"])
        if logger.isEnabledFor(values["levelno"]):
            logger.handle(logging.makeLogRecord(values))
