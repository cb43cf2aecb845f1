"""Tests of the sampling of memory, and of the output that workers print."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from luminosity.engine.workers import printed
from luminosity.engine.workers.printed import WorkerPrints
from luminosity.runs import worker_sampling
from luminosity.runs.sampling import Sampler, TreeMemory
from luminosity.runs.worker_sampling import ProcessUse, WorkerSampler, process_use
from tests.processes import wait_for

pytestmark = pytest.mark.alone

_MB = 1 << 20
_CHILD = "data = bytearray(b'x') * (100 << 20); print(flush=True); input()"
# Starts the child when it gets a line, and ends it when it gets another.
_PARENT = f"""
import subprocess, sys
input()
with subprocess.Popen([sys.executable, "-c", {_CHILD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    print("started", flush=True)
    input()
    child.communicate(b"\\n")
print("ended", flush=True)
input()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="the system does not tell")
def test_the_memory_of_a_process_includes_that_of_those_below_it() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        memory = TreeMemory(parent.pid)
        sampler = WorkerSampler()
        sampler.watch("w1", "cpu", parent.pid)
        measured = [memory.measure()]
        for said in (b"started\n", b"ended\n"):
            parent.stdin.write(b"\n")
            parent.stdin.flush()
            assert parent.stdout.readline() == said
            measured.append(memory.measure())
            sampler.sample(memory.parents, memory.own)
        views = sampler.views({"w1": ("s0",)})
        last = sampler.ended("w1")
        parent.communicate(b"\n", timeout=60)
    before, during, after = measured
    assert during - before > 90 * _MB
    assert after < during - 90 * _MB
    worker, child = views
    assert (worker.worker, worker.pool, worker.running) == ("w1", "cpu", ("s0",))
    assert worker.cpu_seconds > 0
    assert worker.peak_resident >= worker.resident > 0
    assert worker.own > 0
    # A process that a worker has started is a worker of its own. After its end it stays as it was last.
    assert (child.worker, child.pool) == (f"w1 child {child.pid}", "cpu")
    assert child.peak_resident > 90 * _MB
    assert last == replace(worker, running=())


def test_many_workers_are_sampled_in_turn_and_shown_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def process_use(pid: int) -> ProcessUse:
        asked.append(pid)
        return ProcessUse(cpu_seconds=1.0, resident=pid, peak_resident=pid)

    monkeypatch.setattr(worker_sampling, "process_use", process_use)
    sampler = WorkerSampler()
    for number in range(1, 121):
        sampler.watch(f"w{number}", "cpu", number)
    for _ in range(3):
        sampler.sample({}, {})
    assert asked == list(range(1, 121))
    running = {f"w{number}": () for number in range(1, 121)}
    shown = sampler.views(running)
    assert [view.resident for view in shown] == list(range(1, 121, 2))
    sampler.ended("w1")
    sampler.sample({}, {})
    assert asked[120:] == list(range(2, 52))
    assert sampler.views(None)[0].worker == "w1"


def test_a_process_that_has_ended_uses_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait(60)
    assert process_use(child.pid) is None


def test_a_sampler_ends_when_it_is_told_to_and_need_not_have_begun() -> None:
    sampler = Sampler(["declared:0"])
    sampler.stop()
    sampler = Sampler(["declared:0"])
    sampler.start()
    assert wait_for(lambda: sampler.processes.peak > 0, timeout_s=60)
    sampler.stop()
    assert sampler.devices == {}


def test_what_workers_print_comes_out_in_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(printed, "is_terminal", lambda stream: True)
    prints = WorkerPrints(str(tmp_path))
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for connection in (first, second):
            connection.connect(prints.sockets["1"])
        first.sendall("café: begun, ".encode()[:4])
        second.sendall(b"another worker\n")
        first.sendall("café: begun, ".encode()[4:] + b"done\n")
        second.sendall(b"  10%\r  50%\r 100%\r\nno end")
    prints.stop()
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == [" 100%", "another worker", "café: begun, done", "no end"]
