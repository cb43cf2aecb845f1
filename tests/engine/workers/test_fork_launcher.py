"""The fork server is killed: it is started again, what its workers were at is repeated, and nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apache_beam as beam
import psutil
import pytest

from luminosity._shared.text import LOST_WITH_FORK_SERVER, describe_exit
from luminosity.engine.workers import fork_launcher
from luminosity.engine.workers.fork_launcher import ForkLauncher
from luminosity.engine.workers.launcher import ForkServer
from luminosity.errors import WorkerStartFailed
from tests.dofns import Counted
from tests.marks import first_time, note, notes
from tests.processes import fork_servers_of
from tests.runners import IS_CLUSTER, IS_REFERENCE, collect_all, new_pipeline, run

pytestmark = [
    pytest.mark.skipif(IS_REFERENCE or IS_CLUSTER, reason="tests what only the engine does on one machine"),
    pytest.mark.usefixtures("leaves_nothing"),
]

_PATIENCE_S = 60


def _kill_fork_server() -> None:
    """Kill the parent of this worker, and wait for the end that follows."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(_PATIENCE_S)


@pytest.mark.thorough
def test_results_are_exact_while_the_fork_server_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    count, keys, deadly = 900, 5, (100, 400, 401, 700)

    def work(x: int) -> int:
        if x in deadly and first_time(tmp_path / f"killed-{x}"):
            _kill_fork_server()
        return x

    def build(pipeline: beam.Pipeline) -> dict[str, Any]:
        done: Any = pipeline | beam.Create(range(count)) | beam.Reshuffle() | "Work" >> beam.Map(work)
        keyed = done | beam.Map(lambda x: (x % keys, x))
        return {
            "elements": done,
            "sums": keyed | beam.CombinePerKey(sum),
            "numbered": keyed | beam.ParDo(Counted()),
        }

    before = [server.pid for server in fork_servers_of(os.getpid())]
    found, _ = collect_all(build, tmp_path, new_pipeline("--cpu_workers=2"))
    of_key = {key: list(range(key, count, keys)) for key in range(keys)}
    assert len(list(tmp_path.glob("killed-*"))) == len(deadly)
    assert sorted(found["elements"]) == list(range(count))
    assert sorted(found["sums"]) == [(key, sum(xs)) for key, xs in of_key.items()]
    assert sorted(found["numbered"]) == [(key, n + 1) for key, xs in of_key.items() for n in range(len(xs))]
    assert [server.pid for server in fork_servers_of(os.getpid())] != before
    assert caplog.text.count("was killed by SIGKILL: it is started again") in range(1, len(deadly) + 1)


def test_a_fork_server_that_dies_again_and_again_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_launcher, "_MOST_DEATHS", 3)
    tries = tmp_path / "tries"

    def kill(x: int) -> int:
        note(tries)
        _kill_fork_server()
        return x

    with pytest.raises(WorkerStartFailed, match=r"fork server.*killed by SIGKILL, 3 times in a row") as caught:
        run(lambda p: p | beam.Create([1]) | beam.Map(kill), "--cpu_workers=1")
    assert "--worker_start=spawn" in str(caught.value)
    assert len(notes(tries)) == 3  # no attempt more, and the element itself is not to blame


def test_a_worker_whose_start_was_not_reported_counts_as_lost() -> None:
    server = ForkServer()
    launcher = ForkLauncher({"": lambda: server}, progress=lambda: 0)
    codes: list[int] = []
    process = psutil.Process(server.pid)
    process.suspend()
    threading.Timer(0.2, process.kill).start()  # meanwhile, the request is on its way
    request: Any = SimpleNamespace(python="", worker_id="w1")
    try:
        started = _start(launcher, request, codes)
        assert codes == [LOST_WITH_FORK_SERVER]
        assert describe_exit(codes[0]) == "was lost with the fork server, the process that starts workers"
        started.kill()  # as of one that has ended
    finally:
        server.close()


def test_a_server_that_ends_by_itself_is_not_started_again() -> None:
    server = ForkServer(import_path=["/nowhere"])  # has no luminosity
    launcher = ForkLauncher({"": lambda: server}, progress=lambda: 0)
    request: Any = SimpleNamespace(python="", worker_id="w1")
    with pytest.raises(WorkerStartFailed):
        _start(launcher, request, [])
    with pytest.raises(WorkerStartFailed):
        _start(launcher, request, [])


def _start(launcher: ForkLauncher, request: Any, codes: list[int]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("luminosity.engine.workers.launcher.asdict", vars)
        return launcher.start(request, codes.append)
