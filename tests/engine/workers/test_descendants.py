"""What a step starts ends with its worker, in whichever way it was started, and in whichever way the worker ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from luminosity._shared import descendants
from tests.leaving import SCRIPT, WAYS, running
from tests.processes import fork_servers_of, wait_for, workers_of
from tests.runners import IS_CLUSTER, IS_REFERENCE
from tests.warm import WarmProcess

pytestmark = pytest.mark.skipif(IS_REFERENCE or IS_CLUSTER, reason="tests what only the engine does on one machine")

_PATIENCE_S = 200  # on a busy machine: an interpreter that imports Beam may take half a minute

Lum = Callable[..., tuple[WarmProcess, int]]


@pytest.fixture
def lum(tmp_path: Path) -> Iterator[Lum]:
    """Starts ``lum run`` with the script; returns its process and the end of a pipe that has its output."""
    (tmp_path / "leave.py").write_text(SCRIPT)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    made: list[WarmProcess] = []

    def start(ending: str, *flags: str) -> tuple[WarmProcess, int]:
        words = ["run", str(tmp_path / "leave.py"), "--cpu_workers=1", "--progress=off", *flags]
        environment = {
            **os.environ,
            "LEAVING": str(tmp_path),
            "ENDING": ending,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        with open(tmp_path / "errors", "w") as errors:
            made.append(WarmProcess("luminosity.cli.main", *words, env=environment, stdout=writing, stderr=errors))
        os.close(writing)
        return made[0], reading

    yield start
    for process in made:
        process.kill()
        process.wait(_PATIENCE_S)
    for pid in running(tmp_path) + running(tmp_path, "users"):
        os.kill(pid, signal.SIGKILL)
    os.close(reading)


def _read_all(pipe: int) -> str:
    """Return what was written until the last process has closed the pipe, as ``tee`` would."""
    found = b""

    def is_closed() -> bool:
        nonlocal found
        try:
            while chunk := os.read(pipe, 1 << 16):
                found += chunk
        except BlockingIOError:
            return False
        return True

    assert wait_for(is_closed, _PATIENCE_S), "a process still holds the output"
    return found.decode()


def _check_gone(folder: Path) -> None:
    wait_for(lambda: not running(folder), _PATIENCE_S)
    assert running(folder) == []
    assert len(running(folder, "users")) == 1, "the process that the script itself has started is the user's"


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_worker_that_is_killed_and_one_that_finishes_leave_nothing(lum: Lum, start: str, tmp_path: Path) -> None:
    process, output = lum("finished", f"--worker_start={start}")
    assert _read_all(output) == "0 are left\n"
    assert process.wait(_PATIENCE_S) == 0
    _check_gone(tmp_path)


@pytest.mark.parametrize(
    "ending", ["failed", "SIGINT", "SIGTERM", "SIGKILL", "SIGKILL of spawned", "fork server", "all"]
)
def test_an_ending_leaves_nothing(lum: Lum, ending: str, tmp_path: Path) -> None:
    name, _, is_spawned = ending.partition(" of ")
    process, output = lum(ending, f"--worker_start={'spawn' if is_spawned else 'fork'}")
    if ending != "failed":
        assert wait_for(lambda: len(running(tmp_path)) == WAYS, _PATIENCE_S)
    victims = [psutil.Process(process.pid)] if name != "fork server" else []
    victims += fork_servers_of(process.pid) if name in ("fork server", "all") else []
    victims += workers_of(process.pid) if name == "all" else []
    for victim in victims if ending != "failed" else []:
        victim.send_signal(getattr(signal, name, signal.SIGKILL))
    _read_all(output)
    process.wait(_PATIENCE_S)
    _check_gone(tmp_path)
    if name != "SIGKILL":  # the script itself has forked
        # Since 3.12, Python itself warns about the script's own fork, with the line.
        errors = re.sub(r".*DeprecationWarning: This process .*\n.*\n", "", (tmp_path / "errors").read_text())
        assert "fork()" not in errors  # a message of gRPC


_OWNER = """
import os, subprocess, sys
from luminosity._shared import descendants

descendants.can_mark = lambda: False
descendants.join(0)
print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid, flush=True)
os._exit(0)
"""


def test_where_processes_cannot_be_marked_their_group_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True) as owner:
        started = psutil.Process(int(owner.communicate(timeout=_PATIENCE_S)[0]))
    monkeypatch.setattr(descendants, "can_mark", lambda: False)
    descendants.end_group(owner.pid)
    assert wait_for(lambda: not started.is_running() or started.status() == psutil.STATUS_ZOMBIE, _PATIENCE_S)


_FORKING = """
import os, signal, threading, time
from luminosity._shared.descendants import Keeper

thread = threading.Thread(target=lambda: [Keeper() for _ in range(20)], daemon=True)
thread.start()
forked = []
while thread.is_alive() and len(forked) < 200:
    forked.append(os.fork())
    if forked[-1] == 0:
        time.sleep(600)
        os._exit(0)
thread.join(30)
print("is stuck" if thread.is_alive() else "has started all", flush=True)
for pid in forked:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
os._exit(0)
"""


def test_a_process_starts_while_the_user_forks_others() -> None:
    found = subprocess.run([sys.executable, "-c", _FORKING], stdout=subprocess.PIPE, text=True, timeout=_PATIENCE_S)
    assert found.stdout == "has started all\n"
