"""The place where workers of a cluster connect: the Fn API server, whose blocks are objects of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.fnapi.connection import Callbacks, WorkerConnection, WorkerServer

__all__ = ["NodeServer", "NodeWorkers"]


class NodeWorkers(Protocol):
    """What the server needs of the workers on nodes."""

    def secure(self, worker_id: str, elements: beam_fn_api_pb2.Elements) -> bool:
        """Take over the objects that a message names; return False if they are lost. Waits."""
        ...

    def feed(self, worker_id: str, elements: beam_fn_api_pb2.Elements) -> None:
        """Send a worker the references to the objects that a message names. Does not wait."""
        ...

    def connection_lost(self, worker_id: str) -> None:
        """Give up a worker whose connection broke."""
        ...

    def forget(self, worker_id: str) -> None:
        """Free what a worker has sent and the loop has not received."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class _NodeConnection:
    """A connection that names the objects of each bundle to the agent of the worker's node."""

    def __init__(self, inner: WorkerConnection, feed: Callable[[beam_fn_api_pb2.Elements], None]) -> None:
        self._inner = inner
        self._feed = feed
        self.instruct = inner.instruct
        self.cause = inner.cause
        self.finish = inner.finish
        self.close = inner.close

    def send(self, stream_id: str, messages: Iterable[beam_fn_api_pb2.Elements]) -> None:
        def fed() -> Iterable[beam_fn_api_pb2.Elements]:
            for elements in messages:
                self._feed(elements)
                yield elements

        self._inner.send(stream_id, fed())


class NodeServer:
    """Serves the workers of a cluster."""

    def __init__(self, inner: WorkerServer, workers: NodeWorkers) -> None:
        self._inner = inner
        self._workers = workers

    def connect(self, worker_id: str, callbacks: Callbacks) -> WorkerConnection:
        """Expect a worker with this id."""

        def on_elements(elements: beam_fn_api_pb2.Elements) -> None:
            if self._workers.secure(worker_id, elements):
                callbacks.on_elements(elements)

        own = replace(
            callbacks, on_elements=on_elements, on_disconnected=lambda: self._workers.connection_lost(worker_id)
        )
        return _NodeConnection(
            self._inner.connect(worker_id, own), lambda elements: self._workers.feed(worker_id, elements)
        )

    def disconnect(self, worker_id: str) -> None:
        """Close the connection of a worker that has exited, and refuse it from now on."""
        self._inner.disconnect(worker_id)
        self._workers.forget(worker_id)

    def stop(self) -> None:
        """Close all connections, end all workers and stop serving."""
        self._inner.stop()
        self._workers.close()
