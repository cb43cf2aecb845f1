"""Workers that are killed around their start, with a fork server that starts nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from luminosity._shared.text import ENDED_WHILE_STOPPED, describe_exit
from luminosity.engine.cluster.agent import forked_workers
from luminosity.engine.cluster.agent.forked_workers import Exit, ForkedWorkers
from luminosity.engine.workers.request import Entry, WorkerRequest
from luminosity.errors import WorkerStartFailed

_PATIENCE_S = 60


class _Process:
    def __init__(self, on_exit: Callable[[int], None], pid: int = 0) -> None:
        self.pid = pid
        self.kill = lambda: on_exit(-9)


class _Server:
    """Starts a worker when it is told to."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.may_start = threading.Event()
        self.error: Exception | None = None
        self.pid = 0  # of the worker

    def preload(self, modules: Any) -> None:
        """Do nothing."""

    def is_alive(self) -> bool:
        return True

    def start(self, request: WorkerRequest, on_exit: Callable[[int], None], entry: Entry) -> _Process:
        assert self.may_start.wait(_PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.started.append(request.worker_id)
        return _Process(on_exit, self.pid)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> _Server:
    made = _Server()
    monkeypatch.setattr(forked_workers.ForkServer, "shared", lambda: made)
    return made


def _request(worker_id: str) -> WorkerRequest:
    return WorkerRequest(worker_id, "", {}, [], "", [], "", "", "", 0, "", [])


def _nothing(_: WorkerRequest) -> None:
    raise AssertionError("no worker runs here")


def test_a_kill_counts_at_once_before_the_start_and_before_the_request(server: _Server) -> None:
    workers = ForkedWorkers([], is_shared=True)
    try:
        workers.start(_request("first"), _nothing)  # waits for the server
        workers.start(_request("second"), _nothing)
        workers.kill("second")
        assert workers.exits() == [Exit("second", -9)]
        workers.kill("third")  # overtakes its start
        workers.start(_request("third"), _nothing)
        assert workers.exits() == [Exit("third", -9)]
        server.may_start.set()
        workers.start(_request("fourth"), _nothing)
        workers.kill("fourth")
        workers.kill("first")
        found = workers.exits()
        while len(found) < 2:
            found += workers.exits()
        assert {each.worker_id for each in found} == {"first", "fourth"}
        assert {each.code for each in found} == {-9}
    finally:
        workers.close()
    assert not {"second", "third"} & set(server.started)


@pytest.mark.parametrize("error", [WorkerStartFailed("no fork"), OSError("too many files")])
def test_a_start_that_fails_is_told_and_the_next_one_is_tried(server: _Server, error: Exception) -> None:
    server.may_start.set()
    server.error = error
    workers = ForkedWorkers([], is_shared=True)
    try:
        workers.start(_request("first"), _nothing)
        [ended] = workers.exits()
        assert ended == Exit("first", 1, f"{error}")
        server.error = None
        workers.start(_request("second"), _nothing)
        workers.kill("second")
        assert workers.exits()[0].code == -9
    finally:
        workers.close()


def test_a_worker_that_was_stopped_when_it_was_ended_is_not_called_killed(server: _Server) -> None:
    stopped = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    workers = ForkedWorkers([], is_shared=True)
    try:
        stopped.send_signal(signal.SIGSTOP)
        os.waitpid(stopped.pid, os.WUNTRACED)
        server.pid = stopped.pid
        server.may_start.set()
        workers.start(_request("first"), _nothing)
        while workers._processes.get("first") is None:
            time.sleep(0.01)
        workers.kill("first")
        [ended] = workers.exits()
        assert ended.code == ENDED_WHILE_STOPPED
        assert describe_exit(ended.code).startswith("was stopped")
    finally:
        workers.close()
        stopped.kill()
        stopped.wait(_PATIENCE_S)
