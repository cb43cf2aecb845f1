"""Tests of the sampling of memory, and of the output that workers print."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from luminosity.engine.monitor.sampling import Sampler, TreeMemory
from luminosity.engine.workers import printed
from luminosity.engine.workers.printed import WorkerPrints
from tests.processes import wait_for

pytestmark = pytest.mark.alone

_MB = 1 << 20
_CHILD = "import sys; data = bytearray(b'x') * (100 << 20); print('ready', flush=True); sys.stdin.read()"


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="the system does not tell")
def test_the_memory_of_a_process_includes_that_of_those_below_it() -> None:
    memory = TreeMemory(os.getpid())
    before = memory.measure()
    with subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = memory.measure()
        child.communicate(timeout=60)
    assert during - before > 90 * _MB
    assert memory.measure() < during - 90 * _MB


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
