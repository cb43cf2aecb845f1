"""The gRPC server of a run: every worker's control, data, state and logging, on one unix socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc
from apache_beam.utils.thread_pool_executor import UnboundedThreadPoolExecutor

from luminosity.engine.data.state import StateStore
from luminosity.engine.fnapi.connection import Callbacks, Connection
from luminosity.engine.fnapi.logs import LoggingServicer

__all__ = ["FnApiServer"]

_STOP_TIMEOUT_S = 2.0  # for open streams to end; workers have exited by then
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Workers on long bundles send nothing for a while and must not be disconnected.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
]


class FnApiServer:
    """Serves workers at ``url`` from construction until :meth:`stop`.

    The loop's thread connects and disconnects workers. Everything else runs on the server's own threads.
    """

    def __init__(
        self, url: str, state: StateStore, descriptors: dict[str, beam_fn_api_pb2.ProcessBundleDescriptor]
    ) -> None:
        self.descriptors = descriptors
        self.connections: dict[str, Connection] = {}
        # Every open stream occupies a thread, so the number of threads must grow with the number of workers.
        self._threads: Any = UnboundedThreadPoolExecutor()  # gRPC's type stubs are narrower than gRPC
        self._server = grpc.server(self._threads, options=_OPTIONS)
        beam_fn_api_pb2_grpc.add_BeamFnControlServicer_to_server(_Control(self), self._server)
        beam_fn_api_pb2_grpc.add_BeamFnDataServicer_to_server(_Data(self), self._server)
        beam_fn_api_pb2_grpc.add_BeamFnStateServicer_to_server(_State(state), self._server)
        beam_fn_api_pb2_grpc.add_BeamFnLoggingServicer_to_server(LoggingServicer(url), self._server)
        self._server.add_insecure_port(url)
        self._server.start()

    def connect(self, worker_id: str, callbacks: Callbacks) -> Connection:
        """Expect a worker with this id."""
        connection = self.connections[worker_id] = Connection(callbacks)
        return connection

    def disconnect(self, worker_id: str) -> None:
        """Close the connection of a worker that has exited."""
        self.connections.pop(worker_id).close()

    def connection(self, context: grpc.ServicerContext) -> Connection:
        """Return the connection of the worker that makes a call. Aborts the call if the worker is unknown."""
        worker_id = _metadata(context, "worker_id")
        connection = self.connections.get(worker_id)
        if connection is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no such worker: {worker_id!r}")
        return connection

    def stop(self) -> None:
        """Close all connections and stop serving. Blocks for a moment, until streams have ended."""
        for connection in self.connections.values():
            connection.close()
        self._server.stop(0).wait(_STOP_TIMEOUT_S)
        self._threads.shutdown(wait=False)


def _metadata(context: grpc.ServicerContext, name: str) -> str:
    return str(dict(context.invocation_metadata()).get(name, ""))


def _in_background(name: str, iterator: Iterator[Any], handle: Any) -> None:
    """Pass every message of ``iterator`` to ``handle``, on a new thread, until the stream ends."""

    def consume() -> None:
        try:
            for message in iterator:
                handle(message)
        except grpc.RpcError:
            # The worker is gone. The launcher watches its process and tells the loop.
            return

    threading.Thread(target=consume, name=name, daemon=True).start()


class _Control(beam_fn_api_pb2_grpc.BeamFnControlServicer):
    def __init__(self, server: FnApiServer) -> None:
        self._server = server

    def Control(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        connection = self._server.connection(context)
        _in_background("luminosity-control", request_iterator, connection.callbacks.on_response)
        connection.callbacks.on_connected()
        yield from connection.control

    def GetProcessBundleDescriptor(
        self,
        request: beam_fn_api_pb2.GetProcessBundleDescriptorRequest,
        context: grpc.ServicerContext | None = None,
    ) -> beam_fn_api_pb2.ProcessBundleDescriptor:
        return self._server.descriptors[request.process_bundle_descriptor_id]


class _Data(beam_fn_api_pb2_grpc.BeamFnDataServicer):
    def __init__(self, server: FnApiServer) -> None:
        self._server = server

    def Data(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        connection = self._server.connection(context)
        stream_id = _metadata(context, "data_stream_id")
        _in_background("luminosity-data", request_iterator, connection.callbacks.on_elements)
        yield from connection.stream(stream_id)


class _State(beam_fn_api_pb2_grpc.BeamFnStateServicer):
    def __init__(self, state: StateStore) -> None:
        self._state = state

    def State(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for request in request_iterator:
            yield self._state.handle(request)
