"""A secured server, callbacks that note their calls, and clients that act as workers or as strangers."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc

from luminosity.engine.cluster.security import SERVER_NAME, RunSecurity, WorkerAccess, secure_channel
from luminosity.engine.data.state import StateStore
from luminosity.engine.fnapi.connection import Callbacks
from luminosity.engine.fnapi.server import FnApiServer
from luminosity.engine.spill.quota import Ledger

TIMEOUT_S = 60.0
LOOPBACK = "127.0.0.1:0"

_END = object()


class Noted:
    """Notes what the server passes on."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[object] = queue.SimpleQueue()

    def callbacks(self) -> Callbacks:
        return Callbacks(
            on_connected=lambda: self.calls.put("connected"),
            on_response=lambda response: self.calls.put(response.instruction_id),
            on_elements=lambda elements: self.calls.put(elements.data[0].instruction_id),
            on_disconnected=lambda: self.calls.put("disconnected"),
        )

    def next(self) -> object:
        return self.calls.get(timeout=TIMEOUT_S)

    def rest(self) -> list[object]:
        return [self.calls.get_nowait() for _ in range(self.calls.qsize())]


class Client:
    """A worker, or a stranger, with its open streams. Messages that it sends are put into ``sent``."""

    def __init__(self, channel: grpc.Channel, worker_id: str | None = "w", token: str | None = None) -> None:
        self.channel = channel
        self.metadata = [] if worker_id is None else [("worker_id", worker_id)]
        if token is not None:
            self.metadata.append(("authorization", f"Bearer {token}"))
        self.sent: dict[str, queue.SimpleQueue[Any]] = {}
        self.calls: dict[str, Any] = {}

    def stream(self, name: str) -> Any:
        """Open a stream: control, data, state or logging."""
        sent = self.sent[name] = queue.SimpleQueue()

        def messages() -> Iterator[Any]:
            while (message := sent.get(timeout=TIMEOUT_S)) is not _END:
                yield message

        call = self.calls[name] = _STREAMS[name](self.channel)(messages(), metadata=self.metadata, timeout=TIMEOUT_S)
        return call

    def descriptor(self, name: str) -> beam_fn_api_pb2.ProcessBundleDescriptor:
        """Ask for a descriptor."""
        request = beam_fn_api_pb2.GetProcessBundleDescriptorRequest(process_bundle_descriptor_id=name)
        stub = beam_fn_api_pb2_grpc.BeamFnControlStub(self.channel)
        return stub.GetProcessBundleDescriptor(request, metadata=self.metadata, timeout=TIMEOUT_S)

    def refusals(self) -> set[grpc.StatusCode]:
        """Make each of the calls that a worker makes. Returns with which codes they end."""
        codes = {code_of(self.stream(name)) for name in _STREAMS}
        try:
            self.descriptor("d")
        except grpc.RpcError as error:
            return {*codes, code_of(error)}
        return {*codes, grpc.StatusCode.OK}

    def close(self) -> None:
        """End all streams as a process does that exits."""
        for sent in self.sent.values():
            sent.put(_END)
        self.channel.close()


_STREAMS: dict[str, Callable[[grpc.Channel], Any]] = {
    "control": lambda channel: beam_fn_api_pb2_grpc.BeamFnControlStub(channel).Control,
    "data": lambda channel: beam_fn_api_pb2_grpc.BeamFnDataStub(channel).Data,
    "state": lambda channel: beam_fn_api_pb2_grpc.BeamFnStateStub(channel).State,
    "logging": lambda channel: beam_fn_api_pb2_grpc.BeamFnLoggingStub(channel).Logging,
}


def code_of(call: Any) -> grpc.StatusCode:
    """Wait for the end of a call and return its code."""
    return call.code()


def secured_server(folder: str, security: RunSecurity, **descriptors: Any) -> FnApiServer:
    """Return a server on loopback."""
    return FnApiServer(LOOPBACK, StateStore(folder, Ledger(None, 1 << 20, writers=0)), descriptors, security)


def trusting_channel(server: FnApiServer, certificate: str) -> grpc.Channel:
    """Return a channel by TLS without a token."""
    credentials = grpc.ssl_channel_credentials(certificate.encode())
    return grpc.secure_channel(server.url, credentials, options=[("grpc.ssl_target_name_override", SERVER_NAME)])


def worker(server: FnApiServer, access: WorkerAccess, worker_id: str = "w") -> Client:
    """Return a client as a worker is one: with its certificate and token."""
    return Client(secure_channel(access, server.url), worker_id)


def response(instruction_id: str) -> beam_fn_api_pb2.InstructionResponse:
    """Return a response of a worker."""
    return beam_fn_api_pb2.InstructionResponse(instruction_id=instruction_id)


def elements(instruction_id: str) -> beam_fn_api_pb2.Elements:
    """Return elements of a worker."""
    message = beam_fn_api_pb2.Elements()
    message.data.add(instruction_id=instruction_id)
    return message
