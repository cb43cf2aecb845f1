"""A real worker process by TLS: it runs a bundle, is found when it is frozen, and ends with its streams."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
from apache_beam import coders
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.worker.bundle_processor import DATA_INPUT_URN, DATA_OUTPUT_URN
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.cluster.security import RunSecurity
from luminosity.engine.cluster.worker.local_paths import LocalPaths
from luminosity.engine.cluster.worker.node_worker import NodeWorker
from luminosity.engine.data import wire
from luminosity.engine.data.state import StateStore
from luminosity.engine.fnapi.connection import Callbacks
from luminosity.engine.fnapi.server import FnApiServer
from luminosity.engine.spill.quota import Ledger
from luminosity.engine.workers import worker_files
from luminosity.engine.workers.launcher import ForkServer, Process
from luminosity.engine.workers.request import WorkerRequest
from tests.engine.cluster.clients import LOOPBACK

pytestmark = pytest.mark.alone  # starts and freezes processes

_TIMEOUT_S = 60.0
_FOUND_S = 30.0  # the signs of life need 20 s
_WORKER = "cpu.0"
_BUNDLE = "bundle"
_CODER = coders.WindowedValueCoder(coders.BytesCoder(), coders.coders.GlobalWindowCoder())


def echo(url: str) -> beam_fn_api_pb2.ProcessBundleDescriptor:
    """Return a bundle that sends its input back."""
    descriptor = beam_fn_api_pb2.ProcessBundleDescriptor(id="echo")
    descriptor.state_api_service_descriptor.url = url
    port = beam_fn_api_pb2.RemoteGrpcPort(coder_id="windowed")
    port.api_service_descriptor.url = url
    for name, urn in (("read", DATA_INPUT_URN), ("write", DATA_OUTPUT_URN)):
        step = descriptor.transforms[name]
        step.unique_name, step.spec.urn, step.spec.payload = name, urn, port.SerializeToString()
    descriptor.transforms["read"].outputs["out"] = "elements"
    descriptor.transforms["write"].inputs["in"] = "elements"
    pcollection = descriptor.pcollections["elements"]
    pcollection.unique_name, pcollection.coder_id, pcollection.windowing_strategy_id = "elements", "bytes", "global"
    descriptor.windowing_strategies["global"].window_fn.urn = common_urns.global_windows.urn
    descriptor.windowing_strategies["global"].window_coder_id = "window"
    descriptor.coders["bytes"].spec.urn = common_urns.coders.BYTES.urn
    descriptor.coders["window"].spec.urn = common_urns.coders.GLOBAL_WINDOW.urn
    descriptor.coders["windowed"].spec.urn = common_urns.coders.WINDOWED_VALUE.urn
    descriptor.coders["windowed"].component_coder_ids.extend(["bytes", "window"])
    return descriptor


@dataclass
class Heard:
    """What a worker tells the runner."""

    connected: Future[None] = field(default_factory=Future[None])
    response: Future[beam_fn_api_pb2.InstructionResponse] = field(default_factory=Future[object])
    data: Future[bytes] = field(default_factory=Future[bytes])
    disconnected: Future[None] = field(default_factory=Future[None])

    def callbacks(self) -> Callbacks:
        return Callbacks(
            on_connected=lambda: self.connected.set_result(None),
            on_response=self.response.set_result,
            on_elements=self._on_elements,
            on_disconnected=lambda: self.disconnected.set_result(None),  # fails if it is called twice
        )

    def _on_elements(self, elements: beam_fn_api_pb2.Elements) -> None:
        for each in elements.data:
            if each.data:
                self.data.set_result(each.data)


def start(folder: Path, server: FnApiServer, security: RunSecurity, on_exit: Future[int]) -> Process:
    """Start a worker process."""
    Ledger(str(folder / "quota"), 1 << 20, writers=1)
    worker_files.save(str(folder / "main"))
    request = WorkerRequest(
        worker_id=_WORKER,
        url=server.url,
        environment={**os.environ, "https_proxy": "http://127.0.0.1:1"},  # a proxy that does not exist
        arguments=["test"],
        working_directory=str(folder),
        import_path=list(sys.path),
        memory_folder=str(folder),
        spill_folder=str(folder),
        quota=str(folder / "quota"),
        writer=0,
        main_classes=str(folder / "main"),
        private_folders=[],
    )
    worker = NodeWorker(asdict(security.access(_WORKER)), LocalPaths(str(folder)), [], shared_folder=str(folder))
    return ForkServer.shared().start(request, on_exit.set_result, worker)


@pytest.fixture
def security() -> RunSecurity:
    return RunSecurity.create()


@pytest.fixture
def server(tmp_path: Path, security: RunSecurity) -> Iterator[FnApiServer]:
    server = FnApiServer(LOOPBACK, StateStore(str(tmp_path), Ledger(None, 1 << 20, writers=0)), {}, security)
    server.descriptors["echo"] = echo(server.url)
    yield server
    server.stop()


def test_a_worker_by_tls_runs_a_bundle_and_ends_when_it_is_frozen_and_fenced(
    tmp_path: Path, server: FnApiServer, security: RunSecurity
) -> None:
    heard, exited = Heard(), Future[int]()
    connection = server.connect(_WORKER, heard.callbacks())
    process = start(tmp_path, server, security, exited)
    try:
        heard.connected.result(_TIMEOUT_S)
        instruction = beam_fn_api_pb2.InstructionRequest(instruction_id=_BUNDLE)
        instruction.process_bundle.process_bundle_descriptor_id = "echo"
        connection.instruct(instruction)
        block = _CODER.get_impl().encode_nested(WindowedValue(b"over the wire", 0, (GlobalWindow(),)))
        message = beam_fn_api_pb2.Elements()
        message.data.add(instruction_id=_BUNDLE, transform_id="read", data=wire.pack_bytes(1, block))
        message.data.add(instruction_id=_BUNDLE, transform_id="read", is_last=True)
        connection.send("", [message])
        response = heard.response.result(_TIMEOUT_S)
        assert not response.error
        assert wire.read(heard.data.result(_TIMEOUT_S)) == block
        assert not heard.disconnected.done()

        os.kill(process.pid, signal.SIGSTOP)
        heard.disconnected.result(_FOUND_S)
        server.disconnect(_WORKER)
        assert not exited.done()
        os.kill(process.pid, signal.SIGCONT)
        assert exited.result(_TIMEOUT_S) != 0  # it ends by itself, because its streams are broken
    finally:
        process.kill()


def test_a_worker_that_is_told_to_finish_is_not_disconnected(
    tmp_path: Path, server: FnApiServer, security: RunSecurity
) -> None:
    heard, exited = Heard(), Future[int]()
    connection = server.connect(_WORKER, heard.callbacks())
    process = start(tmp_path, server, security, exited)
    try:
        heard.connected.result(_TIMEOUT_S)
        connection.finish()
        assert exited.result(_TIMEOUT_S) == 0
        assert not heard.disconnected.done()
    finally:
        process.kill()
