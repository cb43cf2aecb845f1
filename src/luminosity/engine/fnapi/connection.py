"""One worker's streams, as the runner's threads and the loop see them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from apache_beam.portability.api import beam_fn_api_pb2


@dataclass(frozen=True)
class Callbacks:
    """What comes from a worker. They may run on any thread: they must only pass it on."""

    on_connected: Callable[[], None]
    on_response: Callable[[beam_fn_api_pb2.InstructionResponse], None]
    on_elements: Callable[[beam_fn_api_pb2.Elements], None]


class WorkerConnection(Protocol):
    """A worker as the loop talks to it, wherever it runs."""

    def instruct(self, request: beam_fn_api_pb2.InstructionRequest) -> None: ...

    def send(self, stream_id: str, messages: Iterable[beam_fn_api_pb2.Elements]) -> None:
        """All that a bundle gets."""
        ...

    def cause(self, instruction_id: str) -> BaseException | None:
        """The exception that a response's error tells of, where it was raised in this process. Forgotten when told."""
        ...

    def finish(self) -> None:
        """No more work: the worker ends its bundles, tears down, and exits."""
        ...

    def close(self) -> None: ...


class WorkerServer(Protocol):
    """Where workers connect."""

    def connect(self, worker_id: str, callbacks: Callbacks) -> WorkerConnection:
        """Expect the worker of this name."""
        ...

    def disconnect(self, worker_id: str) -> None: ...

    def stop(self) -> None: ...


class Outbox:
    """Messages on their way to a worker; iterating it ends when it is closed."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()

    def put(self, message: object) -> None:
        self._queue.put(message)

    def close(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[object]:
        while (message := self._queue.get()) is not None:
            yield message


class Connection:
    """Carries instructions and elements to one worker; the server hands what comes back to ``callbacks``."""

    def __init__(self, callbacks: Callbacks) -> None:
        self.callbacks = callbacks
        self.control = Outbox()
        self._streams: dict[str, Outbox] = {}
        self._is_closed = False

    def instruct(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        self.control.put(request)

    def send(self, stream_id: str, messages: Iterable[beam_fn_api_pb2.Elements]) -> None:
        stream = self.stream(stream_id)
        for elements in messages:
            stream.put(elements)

    def stream(self, stream_id: str) -> Outbox:
        stream = self._streams.setdefault(stream_id, Outbox())
        if self._is_closed:
            stream.close()
        return stream

    def cause(self, instruction_id: str) -> BaseException | None:
        return None  # it stayed in the worker's process

    def finish(self) -> None:
        self.control.close()

    def close(self) -> None:
        """End all streams, so that no thread waits for this worker."""
        self._is_closed = True
        self.control.close()
        for stream in list(self._streams.values()):
            stream.close()
