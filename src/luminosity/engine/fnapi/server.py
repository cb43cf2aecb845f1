"""The gRPC server of a run: every worker's control, data, state and logging, on one unix socket or TCP port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc
from apache_beam.utils.thread_pool_executor import UnboundedThreadPoolExecutor

from luminosity.engine.data.state import StateStore
from luminosity.engine.fnapi.connection import Callbacks, Connection, LoggingServicer
from luminosity.errors import InvalidArgument, WorkerStartFailed

__all__ = ["FnApiServer", "Security"]

_STOP_TIMEOUT_S = 2.0  # for open streams to end; workers have exited by then
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Workers on long bundles send nothing for a while and must not be disconnected.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
]
# A worker that is frozen, or whose machine has vanished, closes no connection. The server asks for a sign of life when
# it has heard nothing for a while; the connection breaks if none comes. Both together are the 20 s within which a
# frozen worker is found. gRPC answers without Python's global lock, so user code that holds it for long does no harm.
_SILENCE_MS = 10_000
_ANSWER_MS = 10_000
_HANDSHAKE_MS = 20_000  # a client that connects and says nothing is dropped after this
_TCP_OPTIONS = [
    ("grpc.keepalive_time_ms", _SILENCE_MS),
    ("grpc.keepalive_timeout_ms", _ANSWER_MS),
    ("grpc.http2.ping_timeout_ms", _ANSWER_MS),  # gRPC waits for the longer one of the two, and this is a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ("grpc.so_reuseport", 0),  # no other process may listen on the same port
]


class Security(Protocol):
    """What keeps strangers away from a server on TCP: see ``cluster/security.py``."""

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of the server."""
        ...

    def guard(self, connection: Callable[[str], Connection | None]) -> grpc.ServerInterceptor:
        """Return what checks each call; ``connection`` returns that of a worker, None if it is not expected."""
        ...


class FnApiServer:
    """Serves workers at :attr:`url` from construction until :meth:`stop`.

    Without ``security``, it listens on a unix socket, which the folder's permissions protect. With it, on TCP and by
    TLS, and each call must have the token of a worker that :meth:`connect` has announced and that is not disconnected.

    The loop's thread connects and disconnects workers. Everything else runs on the server's own threads.
    """

    def __init__(
        self,
        url: str,
        state: StateStore,
        descriptors: dict[str, beam_fn_api_pb2.ProcessBundleDescriptor],
        security: Security | None = None,
    ) -> None:
        """``url`` is ``unix:PATH``, or, with ``security``, ``HOST:0`` for any free port of an address of this machine.

        ``descriptors`` may be filled later: descriptors contain the url, whose port is known once the server exists.
        """
        self.descriptors = descriptors
        self.connections: dict[str, Connection] = {}
        # Every open stream occupies a thread, so the number of threads must grow with the number of workers.
        self._threads: Any = UnboundedThreadPoolExecutor()  # gRPC's type stubs are narrower than gRPC
        if security is None:
            self._server = grpc.server(self._threads, options=_OPTIONS)
        else:
            guards = [security.guard(self.connections.get)]
            self._server = grpc.server(self._threads, interceptors=guards, options=_OPTIONS + _TCP_OPTIONS)
        self.url = self._listen(url, security)
        beam_fn_api_pb2_grpc.add_BeamFnControlServicer_to_server(_Control(self), self._server)
        beam_fn_api_pb2_grpc.add_BeamFnDataServicer_to_server(_Data(self), self._server)
        beam_fn_api_pb2_grpc.add_BeamFnStateServicer_to_server(_State(self, state), self._server)
        beam_fn_api_pb2_grpc.add_BeamFnLoggingServicer_to_server(LoggingServicer(self.url), self._server)
        self._server.start()

    def _listen(self, url: str, security: Security | None) -> str:
        """Listen at ``url`` and return the address with the port that was chosen."""
        if security is None:
            if not url.startswith("unix:"):
                raise InvalidArgument(f"found {url!r} without security, expected unix:PATH or a RunSecurity")
            self._server.add_insecure_port(url)
            return url
        host = url.rpartition(":")[0]
        try:
            port = self._server.add_secure_port(url, security.server_credentials())
        except RuntimeError as error:
            raise WorkerStartFailed(
                f"can't listen for workers at {host}: {error}",
                fix="start the pipeline on a machine of the cluster, and check that this is its address there",
            ) from error
        return f"{host}:{port}"

    def connect(self, worker_id: str, callbacks: Callbacks) -> Connection:
        """Expect a worker with this id."""
        connection = self.connections[worker_id] = Connection(callbacks)
        return connection

    def disconnect(self, worker_id: str) -> None:
        """Close the connection of a worker that has exited or is given up. With security, it is refused from now on."""
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


_Handle = Callable[[Any], None]


def _in_background(name: str, iterator: Iterator[Any], connection: Connection, handle: _Handle) -> None:
    """Pass every message of ``iterator`` to ``handle``, on a new thread, until the stream or the connection ends."""

    def consume() -> None:
        try:
            for message in iterator:
                if not connection.deliver(handle, message):
                    return
        except grpc.RpcError:
            return  # the stream is broken
        finally:
            connection.lose()

    threading.Thread(target=consume, name=name, daemon=True).start()


class _Control(beam_fn_api_pb2_grpc.BeamFnControlServicer):
    def __init__(self, server: FnApiServer) -> None:
        self._server = server

    def Control(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        connection = self._server.connection(context)
        if not connection.take_control():
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "this worker has, or had, a control stream already")
        connection.watch(context)
        _in_background("luminosity-control", request_iterator, connection, connection.callbacks.on_response)
        connection.deliver(lambda _: connection.callbacks.on_connected(), None)
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
        connection.watch(context)
        _in_background("luminosity-data", request_iterator, connection, connection.callbacks.on_elements)
        yield from connection.stream(stream_id)


class _State(beam_fn_api_pb2_grpc.BeamFnStateServicer):
    def __init__(self, server: FnApiServer, state: StateStore) -> None:
        self._server = server
        self._state = state

    def State(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        self._server.connection(context).watch(context)
        for request in request_iterator:
            yield self._state.handle(request)
