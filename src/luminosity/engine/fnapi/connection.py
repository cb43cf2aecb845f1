"""The connection to one worker: its interface for the loop, its streams for the server, and its log records.

Log records of workers go to the loggers of the same names in the runner.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc

__all__ = [
    "PRINTED",
    "Callbacks",
    "Connection",
    "LoggingServicer",
    "Outbox",
    "WorkerConnection",
    "WorkerOrigin",
    "WorkerServer",
    "add_logger_name",
    "worker_origin",
]

_M = TypeVar("_M")
PRINTED = "luminosity.printed"  # and the name of a standard stream: the logger of what workers elsewhere print
_SEPARATOR = "|"  # between the logger's name and the file
_UNNAMED = "luminosity.worker"  # the logger for records without a name
_LEVELS = {
    beam_fn_api_pb2.LogEntry.Severity.TRACE: logging.DEBUG,
    beam_fn_api_pb2.LogEntry.Severity.DEBUG: logging.DEBUG,
    beam_fn_api_pb2.LogEntry.Severity.INFO: logging.INFO,
    beam_fn_api_pb2.LogEntry.Severity.NOTICE: logging.INFO,
    beam_fn_api_pb2.LogEntry.Severity.WARN: logging.WARNING,
    beam_fn_api_pb2.LogEntry.Severity.ERROR: logging.ERROR,
    beam_fn_api_pb2.LogEntry.Severity.CRITICAL: logging.CRITICAL,
}


def _ignore() -> None:
    pass


@dataclass(frozen=True)
class Callbacks:
    """Called for what comes from a worker, on any thread. One that waits holds back what comes on the same stream."""

    on_connected: Callable[[], None]
    on_response: Callable[[beam_fn_api_pb2.InstructionResponse], None]
    on_elements: Callable[[beam_fn_api_pb2.Elements], None]
    on_disconnected: Callable[[], None] = _ignore  # once, if a stream breaks or ends before the runner ends it


class WorkerConnection(Protocol):
    """How the loop reaches a worker, in another process or in this one. No method waits for the worker's response."""

    def instruct(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        """Send an instruction."""
        ...

    def send(self, stream_id: str, messages: Iterable[beam_fn_api_pb2.Elements]) -> None:
        """Send the whole input of a bundle."""
        ...

    def cause(self, instruction_id: str) -> BaseException | None:
        """Return, once, the exception behind an error response, if it was raised in this process."""
        ...

    def finish(self) -> None:
        """Tell the worker that there is no more work. It ends its bundles, tears down its steps, and exits."""
        ...

    def close(self) -> None:
        """End all streams."""
        ...


class WorkerServer(Protocol):
    """The place where workers connect."""

    def connect(self, worker_id: str, callbacks: Callbacks) -> WorkerConnection:
        """Expect a worker with this id. Returns its connection, which is usable at once."""
        ...

    def disconnect(self, worker_id: str) -> None:
        """Close the connection of a worker that has exited."""
        ...

    def stop(self) -> None:
        """Close all connections and stop serving."""
        ...


class Outbox:
    """A queue of messages to a worker. Iterating blocks for the next message and ends once the queue is closed."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()

    def put(self, message: object) -> None:
        """Queue a message."""
        self._queue.put(message)

    def close(self) -> None:
        """End the iteration after the messages that are queued."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[object]:
        while (message := self._queue.get()) is not None:
            yield message


class Connection:
    """The connection to a worker in another process.

    The loop's thread queues instructions and elements; the server's threads send them, and pass what comes back to
    ``callbacks``.
    """

    def __init__(self, callbacks: Callbacks) -> None:
        self.callbacks = callbacks
        self.control = Outbox()
        self._streams: dict[str, Outbox] = {}
        self._lock = threading.Lock()
        self._calls: set[grpc.ServicerContext] = set()  # to cancel when the connection closes
        self._has_control = False
        self._is_ending = False  # the runner ends the streams, or has been told that they broke
        self._is_closed = False

    def instruct(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        """Queue an instruction."""
        self.control.put(request)

    def send(self, stream_id: str, messages: Iterable[beam_fn_api_pb2.Elements]) -> None:
        """Queue the whole input of a bundle."""
        stream = self.stream(stream_id)
        for elements in messages:
            stream.put(elements)

    def stream(self, stream_id: str) -> Outbox:
        """Return the queue of a data stream, which the server sends."""
        stream = self._streams.setdefault(stream_id, Outbox())
        if self._is_closed:
            stream.close()
        return stream

    def cause(self, instruction_id: str) -> BaseException | None:
        """Return None: exceptions stay in the worker's process."""
        return None

    def finish(self) -> None:
        """End the control stream, which tells the worker to exit once it is done."""
        self._is_ending = True
        self.control.close()

    def close(self) -> None:
        """End all streams, so that no thread of the server waits for this worker. What it sends later is dropped."""
        with self._lock:
            self._is_ending = self._is_closed = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()
        self.control.close()
        for stream in list(self._streams.values()):
            stream.close()

    # For the server's threads

    def take_control(self) -> bool:
        """Return True for the first control stream: a second one would take instructions from it."""
        with self._lock:
            is_first = not self._has_control
            self._has_control = True
            return is_first

    def enter(self, call: grpc.ServicerContext) -> bool:
        """Cancel the call when the connection closes. Returns False if it has closed."""
        with self._lock:
            if self._is_closed:
                return False
            self._calls.add(call)
        if not call.add_callback(lambda: self._calls.discard(call)):
            self._calls.discard(call)
        return True

    def while_open(self, messages: Iterator[_M]) -> Iterator[_M]:
        """Yield messages of the worker until the connection closes."""
        for message in messages:
            if self._is_closed:
                return
            yield message

    def deliver(self, handle: Callable[[_M], None], message: _M) -> bool:
        """Pass a message to a callback. Returns False, and does nothing, if the connection has closed."""
        if self._is_closed:  # not under the lock, which close() needs: a callback may wait
            return False
        handle(message)
        return True

    def watch(self, call: grpc.ServicerContext) -> None:
        """Report the worker as disconnected if the call ends before the runner ends it."""
        if not call.add_callback(self.lose):
            self.lose()

    def lose(self) -> None:
        """Report, once, that the worker is disconnected, unless the runner has ended the streams."""
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        # Not on this thread: it may be the one on which gRPC takes all calls.
        threading.Thread(target=self.callbacks.on_disconnected, name="luminosity-disconnected", daemon=True).start()


@dataclass(frozen=True)
class WorkerOrigin:
    """Where a log record of a worker comes from."""

    url: str  # of the server that the worker is connected to
    worker: str
    step: str = ""  # empty if it is not known
    traceback: str = ""


_here = threading.local()


def worker_origin() -> WorkerOrigin | None:
    """Return where the record comes from that this thread passes on; None if the record is of this process."""
    return getattr(_here, "origin", None)


def add_logger_name(record: logging.LogRecord) -> bool:
    """Put the logger's name before the record's path. Beam's messages have a field for the path, but not for the name.

    Workers use it as a filter of Beam's log handler.
    """
    record.pathname = f"{record.name}{_SEPARATOR}{record.pathname}"
    return True


class LoggingServicer(beam_fn_api_pb2_grpc.BeamFnLoggingServicer):
    """Receives the log records of all workers, on the server's threads."""

    def __init__(self, url: str) -> None:
        """``url`` is the address of the server."""
        self._url = url

    def Logging(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Pass on a worker's log records until it closes the stream. Sends no responses."""
        worker = str(dict(context.invocation_metadata()).get("worker_id", ""))
        for entries in request_iterator:
            for entry in entries.log_entries:
                _here.origin = WorkerOrigin(self._url, worker, entry.transform_id, entry.trace)
                try:
                    _log(entry)
                finally:
                    _here.origin = None
        return
        yield  # makes this a generator, as gRPC needs for a stream


def _log(entry: beam_fn_api_pb2.LogEntry) -> None:
    place, _, line = entry.log_location.rpartition(":")
    name, _, path = place.rpartition(_SEPARATOR)
    if name.startswith(PRINTED):
        # Looked up each time, because a live view replaces the stream.
        print(entry.message, file=sys.stderr if name.endswith("stderr") else sys.stdout, flush=True)
        return
    logger = logging.getLogger(name if name != "root" else None) if name else logging.getLogger(_UNNAMED)
    level = _LEVELS.get(entry.severity, logging.INFO)
    if logger.isEnabledFor(level):
        number = int(line) if line.isdigit() else 0
        logger.handle(logger.makeRecord(logger.name, level, path, number, entry.message, (), None))
