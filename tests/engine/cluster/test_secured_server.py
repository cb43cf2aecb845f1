"""Who may talk to a server on TCP, and what happens when a worker vanishes or is given up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.cluster.security import RunSecurity, WorkerAccess
from luminosity.engine.data.state import StateStore
from luminosity.engine.fnapi.connection import Connection
from luminosity.engine.fnapi.server import FnApiServer
from luminosity.engine.spill.quota import Ledger
from luminosity.errors import InvalidArgument, WorkerStartFailed
from tests.engine.cluster.clients import (
    TIMEOUT_S,
    Client,
    Noted,
    code_of,
    elements,
    response,
    secured_server,
    trusting_channel,
    worker,
)
from tests.processes import wait_for

_REFUSED = {grpc.StatusCode.UNAUTHENTICATED}


@pytest.fixture
def security() -> RunSecurity:
    return RunSecurity.create()


@pytest.fixture
def server(tmp_path: Path, security: RunSecurity) -> Iterator[FnApiServer]:
    server = secured_server(str(tmp_path), security, d=beam_fn_api_pb2.ProcessBundleDescriptor(id="d"))
    yield server
    server.stop()


def connected(server: FnApiServer, security: RunSecurity, worker_id: str = "w") -> tuple[Client, Noted, Connection]:
    """Return a worker with an open control stream."""
    noted = Noted()
    connection = server.connect(worker_id, noted.callbacks())
    client = worker(server, security.access(worker_id), worker_id)
    client.stream("control")
    assert noted.next() == "connected"
    return client, noted, connection


def busy_threads(server: FnApiServer) -> int:
    """Return how many threads of the server's pool serve a call. Others are idle, and the next calls use them."""
    pool = server._threads
    return len(pool._workers) - pool._idle_worker_queue.qsize()


def test_a_worker_is_served(server: FnApiServer, security: RunSecurity) -> None:
    client, noted, connection = connected(server, security)
    assert server.url.startswith("127.0.0.1:")
    assert not server.url.endswith(":0")
    assert client.descriptor("d").id == "d"
    client.sent["control"].put(response("i1"))
    assert noted.next() == "i1"
    data = client.stream("data")
    client.sent["data"].put(elements("i2"))
    assert noted.next() == "i2"
    connection.send("", [elements("i3")])
    assert next(data).data[0].instruction_id == "i3"
    state = client.stream("state")
    client.sent["state"].put(beam_fn_api_pb2.StateRequest(id="s", instruction_id="none"))
    assert "is not running" in next(state).error
    client.close()


@pytest.mark.parametrize("who", ["no token", "no worker", "wrong token", "token of another", "token of another run"])
def test_strangers_are_refused(server: FnApiServer, security: RunSecurity, who: str) -> None:
    noted = Noted()
    for worker_id in ("w", "v"):
        server.connect(worker_id, noted.callbacks())
    token = {
        "no token": None,
        "no worker": security.token("w"),
        "wrong token": "0" * 64,
        "token of another": security.token("v"),
        "token of another run": RunSecurity.create().token("w"),
    }[who]
    client = Client(trusting_channel(server, security.certificate), None if who == "no worker" else "w", token)
    assert client.refusals() == _REFUSED
    details = client.stream("control").details()
    assert security.token("w") not in details
    client.close()
    assert noted.rest() == []


def test_a_worker_that_is_not_expected_is_refused(server: FnApiServer, security: RunSecurity) -> None:
    client = worker(server, security.access("unknown"), "unknown")
    assert client.refusals() == _REFUSED
    client.close()


def test_a_worker_trusts_no_other_certificate(server: FnApiServer, security: RunSecurity) -> None:
    noted = Noted()
    server.connect("w", noted.callbacks())
    access = WorkerAccess(RunSecurity.create().certificate, security.token("w"))
    client = worker(server, access)
    assert code_of(client.stream("control")) == grpc.StatusCode.UNAVAILABLE
    client.close()
    assert noted.rest() == []


def test_plain_text_is_not_served(server: FnApiServer, security: RunSecurity) -> None:
    noted = Noted()
    server.connect("w", noted.callbacks())
    client = Client(grpc.insecure_channel(server.url), "w", security.token("w"))
    assert code_of(client.stream("control")) == grpc.StatusCode.UNAVAILABLE
    client.close()
    assert noted.rest() == []


def test_a_proxy_of_the_environment_is_not_used(
    server: FnApiServer, security: RunSecurity, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    connected(server, security)[0].close()


def test_a_worker_that_is_given_up_is_fenced(server: FnApiServer, security: RunSecurity) -> None:
    """Its streams end, it can open no others, and nothing that it sends arrives. Others are served as before."""
    client, noted, _ = connected(server, security)
    other, _, _ = connected(server, security, "v")
    client.stream("logging")
    client.stream("data")
    client.sent["data"].put(elements("before"))
    assert noted.next() == "before"
    state = client.stream("state")
    client.sent["state"].put(beam_fn_api_pb2.StateRequest(id="s"))
    next(state)
    server.disconnect("w")
    client.sent["data"].put(elements("after"))
    client.sent["control"].put(response("after"))
    for name in ("control", "data", "state"):
        assert code_of(client.calls[name]) == grpc.StatusCode.CANCELLED
    assert code_of(client.calls["logging"]) in _REFUSED | {grpc.StatusCode.CANCELLED}
    again = worker(server, security.access("w"))
    assert again.refusals() == _REFUSED
    again.close()
    assert other.descriptor("d").id == "d"
    client.close()
    other.close()
    assert noted.rest() == []  # not even that it disconnected: the runner did that


def test_a_second_control_stream_is_refused(server: FnApiServer, security: RunSecurity) -> None:
    client, noted, connection = connected(server, security)
    second = worker(server, security.access("w"))
    assert code_of(second.stream("control")) == grpc.StatusCode.ALREADY_EXISTS
    second.close()
    client.sent["control"].put(response("i"))
    assert noted.next() == "i"  # the first is as it was
    client.close()
    assert noted.next() == "disconnected"
    connection.close()


@pytest.mark.parametrize("stream", ["control", "data", "state"])
def test_a_worker_that_vanishes_is_reported_once(server: FnApiServer, security: RunSecurity, stream: str) -> None:
    client, noted, _ = connected(server, security)
    opened = client.stream(stream) if stream != "control" else None
    if stream == "data":
        client.sent["data"].put(elements("i"))
        assert noted.next() == "i"
    elif stream == "state":
        assert opened is not None
        client.sent["state"].put(beam_fn_api_pb2.StateRequest(id="s"))
        next(opened)
    if opened is not None:
        opened.cancel()
    else:
        client.channel.close()
    assert noted.next() == "disconnected"
    client.close()
    server.disconnect("w")
    assert noted.rest() == []


@pytest.mark.parametrize("way", ["finish", "close", "stop"])
def test_a_worker_that_the_runner_ends_is_not_reported(server: FnApiServer, security: RunSecurity, way: str) -> None:
    client, noted, connection = connected(server, security)
    data = client.stream("data")
    client.sent["data"].put(elements("i"))
    assert noted.next() == "i"
    if way == "finish":
        connection.finish()
    elif way == "close":
        connection.close()
    else:
        server.stop()
    client.close()
    assert code_of(data) is not None
    server.stop()
    assert noted.rest() == []


def test_a_flood_of_strangers_leaves_nothing_open(
    server: FnApiServer, security: RunSecurity, caplog: pytest.LogCaptureFixture
) -> None:
    client, noted, _ = connected(server, security)
    strangers = [Client(trusting_channel(server, security.certificate), f"w{n}", "x") for n in range(50)]
    with caplog.at_level(logging.WARNING):
        calls = [stranger.stream(name) for stranger in strangers for name in ("control", "data", "state", "logging")]
        assert {code_of(call) for call in calls} == _REFUSED
    for stranger in strangers:
        stranger.close()
    assert sum("is not a worker of this run" in record.getMessage() for record in caplog.records) == 1
    assert wait_for(lambda: busy_threads(server) == 1, TIMEOUT_S)  # the worker's control stream
    client.sent["control"].put(response("i"))
    assert noted.next() == "i"
    client.close()


def test_a_callback_that_waits_holds_back_only_its_own_stream(server: FnApiServer, security: RunSecurity) -> None:
    """Responses arrive meanwhile, and so does the end of the worker; the runner can give it up."""
    noted, may_go_on = Noted(), threading.Event()

    def wait(elements: beam_fn_api_pb2.Elements) -> None:
        noted.calls.put("waits")
        may_go_on.wait(TIMEOUT_S)

    server.connect("w", replace(noted.callbacks(), on_elements=wait))
    client = worker(server, security.access("w"))
    client.stream("data")
    client.sent["data"].put(elements("i"))
    client.sent["data"].put(elements("late"))
    assert noted.next() == "waits"
    client.stream("control")
    assert noted.next() == "connected"
    client.sent["control"].put(response("r"))
    assert noted.next() == "r"
    client.channel.close()
    assert noted.next() == "disconnected"
    server.disconnect("w")
    may_go_on.set()
    assert wait_for(lambda: busy_threads(server) == 0, TIMEOUT_S)
    client.close()
    assert noted.rest() == []  # not the message that was not read yet


def test_an_address_that_can_not_be_used(tmp_path: Path, security: RunSecurity) -> None:
    state = StateStore(str(tmp_path), Ledger(None, 1 << 20, writers=0))
    with pytest.raises(WorkerStartFailed, match=r"can't listen for workers at 192\.0\.2\.1"):
        FnApiServer("192.0.2.1:0", state, {}, security)  # an address for documentation, which no machine has
    with pytest.raises(InvalidArgument, match="without security"):
        FnApiServer("127.0.0.1:0", state, {})
