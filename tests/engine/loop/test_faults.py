"""Tests of faults: workers die, user code raises, the run is interrupted.

The results must be exact or the error clear, and no process or file may be left.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import psutil
import pytest

from luminosity.engine.loop import splits
from luminosity.errors import ElementKillsWorker, StepFailed
from tests.dofns import Counted, Numbers
from tests.marks import first_time, note, notes, wait_for_file
from tests.processes import (
    MOST_KILLS,
    files_of,
    files_of_luminosity,
    fork_servers_of,
    kill_workers_of,
    wait_for,
    workers_of,
)
from tests.runners import IS_REFERENCE, collect, collect_all, new_pipeline, run

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing"),
]

_TRIES = 4
_THIS_FILE = Path(__file__).name


# ---- workers that die


def test_results_are_exact_while_workers_are_killed(tmp_path: Path) -> None:
    count, keys = 800, 5
    at_work, killed = tmp_path / "at-work", tmp_path / "killed"

    def slow(x: int) -> int:
        note(at_work, os.getpid())
        time.sleep(0.002)
        if x == count - 1:
            wait_for_file(killed)
        return x

    def build(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
        numbers = (
            pipeline
            | beam.Create([(start, start + 200) for start in range(0, count, 200)])
            | beam.ParDo(Numbers(seconds_each=0.004))
        )
        shuffled = numbers | beam.Reshuffle() | "Slow" >> beam.Map(slow)
        keyed = shuffled | beam.Map(lambda x: (x % keys, x))
        return {
            "elements": shuffled,
            "groups": keyed | beam.GroupByKey() | beam.MapTuple(lambda key, xs: (key, sorted(xs))),
            "sums": keyed | beam.CombinePerKey(sum),
            "numbered": keyed | beam.ParDo(Counted()),
        }

    with kill_workers_of(os.getpid(), every_s=0.4, at_work=at_work, over=killed) as kills:
        found, _ = collect_all(build, tmp_path, new_pipeline("--cpu_workers=2"))

    of_key = {key: list(range(key, count, keys)) for key in range(keys)}
    assert kills.count == MOST_KILLS
    assert Counter(found["elements"]) == Counter(range(count))
    assert sorted(found["groups"]) == sorted(of_key.items())
    assert sorted(found["sums"]) == [(key, sum(xs)) for key, xs in of_key.items()]
    assert sorted(found["numbered"]) == [(key, n + 1) for key, xs in of_key.items() for n in range(len(xs))]


def test_a_worker_that_ends_once_costs_nothing(tmp_path: Path) -> None:
    flag = tmp_path / "died"

    def end_once(x: int) -> int:
        if x == 13 and first_time(flag):
            os._exit(3)
        return x

    build = lambda p: p | beam.Create(range(100)) | beam.Map(end_once)  # noqa: E731
    found = collect(build, tmp_path, new_pipeline("--cpu_workers=2"))
    assert flag.exists()
    assert Counter(found) == Counter(range(100))


def test_an_element_that_ends_its_worker_is_named(tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"

    def end(x: str) -> None:
        note(deaths)
        os._exit(3)

    with pytest.raises(ElementKillsWorker) as caught:
        run(lambda p: p | beam.Create(["the one"]) | beam.Reshuffle() | "Deadly" >> beam.Map(end), "--cpu_workers=2")
    assert "Deadly" in str(caught.value)
    assert "the one" in str(caught.value)
    assert len(notes(deaths)) == _TRIES
    assert "Code of the step ended the process, as os._exit(3) does" in str(caught.value)
    assert "memory" not in str(caught.value)


def test_an_element_that_ends_its_worker_is_told_from_its_neighbours() -> None:
    def end_at(x: str) -> str:
        if x == "number 42":
            os._exit(3)
        return x

    elements = [f"number {i}" for i in range(64)]
    with pytest.raises(ElementKillsWorker) as caught:
        run(lambda p: p | beam.Create(elements) | "Deadly" >> beam.Map(end_at), "--cpu_workers=2")
    assert "Deadly" in str(caught.value)
    assert "number 42" in str(caught.value)


@pytest.mark.one_machine("there is no fork server")
def test_the_fork_server_survives_its_workers(tmp_path: Path) -> None:
    """All runs of a process share one fork server, also after runs that failed."""
    before = [server.pid for server in fork_servers_of(os.getpid())]
    with pytest.raises(ElementKillsWorker):
        run(lambda p: p | beam.Create([1]) | beam.Map(lambda _: os._exit(3)), "--cpu_workers=1")
    assert collect(lambda p: p | beam.Create([1]), tmp_path, new_pipeline("--cpu_workers=1")) == [1]
    assert [server.pid for server in fork_servers_of(os.getpid())] == before


# ---- user code that raises


def test_a_users_exception_says_where_and_with_what(tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    element = "e" * 1000

    def fail(x: str) -> None:
        note(tries)
        raise ValueError("no good")

    line = inspect.getsourcelines(fail)[1] + 2
    with pytest.raises(StepFailed) as caught:
        run(lambda p: p | beam.Create([element]) | "Failing step" >> beam.Map(fail), "--cpu_workers=2")
    message = str(caught.value)
    assert "Failing step" in message
    assert f"{_THIS_FILE}:{line}" in message
    assert element[:100] in message
    assert element[:201] not in message
    assert "Traceback (most recent call last)" in message
    assert "in fail" in message
    assert "ValueError: no good" in message
    assert len(notes(tries)) == _TRIES


def test_the_failing_element_is_told_from_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "can_split", lambda bundle: False)  # what is split off a bundle has all its attempts
    tries = tmp_path / "tries"

    def fail_at(x: str) -> str:
        if x == "number 42":
            note(tries)
            raise ValueError("no good")
        return x

    elements = [f"number {i}" for i in range(64)]
    with pytest.raises(StepFailed, match="number 42"):
        run(lambda p: p | beam.Create(elements) | beam.Map(fail_at), "--cpu_workers=2")
    assert len(notes(tries)) == _TRIES


class FailingAtTheStart(beam.DoFn):
    def setup(self) -> None:
        raise ValueError("no good")

    def process(self, element: int) -> Iterable[int]:
        yield element


class FailingAtTheEnd(beam.DoFn):
    def process(self, element: int) -> Iterable[int]:
        yield element

    def finish_bundle(self) -> None:
        raise ValueError("no good")


@pytest.mark.parametrize("failing", [FailingAtTheStart, FailingAtTheEnd])
def test_an_exception_outside_of_process_fails_the_run(failing: type[beam.DoFn]) -> None:
    with pytest.raises(StepFailed, match="ValueError: no good") as caught:
        run(lambda p: p | beam.Create([1]) | "Failing step" >> beam.ParDo(failing()), "--cpu_workers=1")
    assert "Failing step" in str(caught.value)
    assert _THIS_FILE in str(caught.value)


def test_an_exception_that_goes_away_costs_nothing(tmp_path: Path) -> None:
    tries = tmp_path / "tries"

    def fail_twice(x: int) -> int:
        if x == 13:
            note(tries)
            if len(notes(tries)) < 3:
                raise ValueError("not yet")
        return x

    build = lambda p: p | beam.Create(range(100)) | beam.Map(fail_twice)  # noqa: E731
    found = collect(build, tmp_path, new_pipeline("--cpu_workers=2"))
    assert Counter(found) == Counter(range(100))
    assert len(notes(tries)) == 3


def test_state_of_a_bundle_that_fails_is_forgotten(tmp_path: Path) -> None:
    flag = tmp_path / "failed"

    class FailingOnce(Counted):
        def finish_bundle(self) -> None:
            if first_time(flag):
                raise ValueError("after state was written")

    build = lambda p: p | beam.Create([(0, x) for x in range(20)]) | beam.ParDo(FailingOnce())  # noqa: E731
    found = collect(build, tmp_path, new_pipeline("--cpu_workers=2"))
    assert flag.exists()
    assert sorted(found) == [(0, n) for n in range(1, 21)]


@pytest.mark.parametrize(("make", "name"), [(threading.Lock, "lock"), (lambda: memoryview(b""), "memoryview")])
def test_an_element_that_cannot_be_sent_is_a_clear_error(make: Callable[[], Any], name: str) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        pipeline | beam.Create([1]) | "Unsendable" >> beam.Map(lambda _: make()) | beam.Reshuffle()

    with pytest.raises(StepFailed, match=rf"(?s)cannot pickle.*{name}") as caught:
        run(build, "--cpu_workers=2")
    assert "Unsendable" in str(caught.value)


# ---- the end of the runner's own process

_LONG_RUN = """
    import time
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
    from luminosity import LuminosityRunner

    def slow(x):
        with open(STARTED, "a") as file:
            file.write(".")
        time.sleep(0.1)
        return x

    options = PipelineOptions(["--cpu_workers=2", "--progress=off"])
    with beam.Pipeline(runner=LuminosityRunner(), options=options) as pipeline:
        pipeline | beam.Create(range(10_000)) | beam.Reshuffle() | beam.Map(slow)
"""


@contextlib.contextmanager
def long_run(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Start a process that runs a long pipeline. Yields it and its descendants once the pipeline runs."""
    script, started, folder = tmp_path / "script.py", tmp_path / "started", tmp_path / "tmp"
    folder.mkdir()
    script.write_text(f"STARTED = {str(started)!r}\n" + textwrap.dedent(_LONG_RUN))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group that can be interrupted as a terminal does it
    )
    try:
        assert wait_for(lambda: started.exists() or process.poll() is not None, timeout_s=60)
        assert process.poll() is None, process.communicate()[0]
        assert workers_of(process.pid)
        yield process, psutil.Process(process.pid).children(recursive=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


@pytest.mark.one_machine("looks at processes that the runner has started")
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    with long_run(tmp_path) as (process, descendants):
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert "KeyboardInterrupt" in output
        assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
        assert psutil.wait_procs(descendants, timeout=60)[1] == []
    assert files_of_luminosity(tmp_path / "tmp") == set()
    assert files_of(process.pid) == set()


@pytest.mark.one_machine("looks at processes that the runner has started")
@pytest.mark.parametrize("is_for_all", [False, True], ids=["the process", "its group"])
def test_sigterm_ends_everything(tmp_path: Path, is_for_all: bool) -> None:
    with long_run(tmp_path) as (process, descendants):
        (os.killpg if is_for_all else os.kill)(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert "terminated: the run is cancelled\n" in output
        assert "Traceback" not in output
        assert process.returncode == 128 + signal.SIGTERM
        assert psutil.wait_procs(descendants, timeout=60)[1] == []
    assert files_of_luminosity(tmp_path / "tmp") == set()
    assert files_of(process.pid) == set()


@pytest.mark.one_machine("looks at processes that the runner has started")
def test_workers_end_with_their_runner(tmp_path: Path) -> None:
    with long_run(tmp_path) as (process, descendants):
        process.kill()
        process.wait(timeout=60)
        assert psutil.wait_procs(descendants, timeout=60)[1] == []
