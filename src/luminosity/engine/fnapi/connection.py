"""The connection to one worker: its interface for the loop, and its streams for the server."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from apache_beam.portability.api import beam_fn_api_pb2

__all__ = ["Callbacks", "Connection", "Outbox", "WorkerConnection", "WorkerServer"]


@dataclass(frozen=True)
class Callbacks:
    """Called for what comes from a worker. They may be called on any thread and must return at once."""

    on_connected: Callable[[], None]
    on_response: Callable[[beam_fn_api_pb2.InstructionResponse], None]
    on_elements: Callable[[beam_fn_api_pb2.Elements], None]


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
        self.control.close()

    def close(self) -> None:
        """End all streams, so that no thread of the server waits for this worker."""
        self._is_closed = True
        self.control.close()
        for stream in list(self._streams.values()):
            stream.close()
