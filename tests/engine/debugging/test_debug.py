"""Tests of ``--debug``: one process, one thread, one bundle at a time, and the user's own exception."""

from __future__ import annotations

import bdb
import contextlib
import inspect
import logging
import os
import pickle
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.metrics import Metrics, MetricsFilter
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineState

from luminosity.core import WorkerShare
from luminosity.errors import RunCancelled, StepFailed
from tests.recipes import OPERATIONS, Recipe
from tests.runners import IS_REFERENCE, collect, new_pipeline, run, start

pytestmark = [
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing"),
]

_SEEN: list[Any] = []  # user code runs in this process, and finds this very list


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    _SEEN.clear()


# ---- a debugger, for real

_PIPELINE = """
import apache_beam as beam

def double(x):
    doubled = 2 * x
    breakpoint()
    return doubled

if __name__ == "__main__":
    with beam.Pipeline() as pipeline:
        pipeline | beam.Create([21]) | beam.Map(double) | beam.Map(lambda x: print("gives", x))
    print("the end")
"""


class Terminal:
    """A command at a terminal, and the keys that a user types."""

    def __init__(self, *command: str) -> None:
        self._side, theirs = pty.openpty()
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        self._read = ""

    def wait_for(self, text: str, timeout_s: float = 60) -> str:
        """Return the output since the last call, up to and including ``text``."""
        deadline = time.monotonic() + timeout_s
        while text not in self._read:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {self._read!r}"
            assert select.select([self._side], [], [], left)[0], f"no {text!r} in {self._read!r}"
            try:
                self._read += os.read(self._side, 4096).decode()
            except OSError:  # how a terminal ends
                raise AssertionError(f"the command ended before {text!r}: {self._read!r}") from None
        before, _, self._read = self._read.partition(text)
        return before + text

    def type(self, line: str) -> None:
        os.write(self._side, line.encode() + b"\n")

    def interrupt(self) -> None:
        """Send what Ctrl-C sends."""
        os.killpg(self._process.pid, signal.SIGINT)

    def exit_code(self) -> int:
        return self._process.wait(timeout=60)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=60)
        os.close(self._side)


@contextlib.contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    opened = Terminal(*command)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "pipeline.py"
    path.write_text(_PIPELINE)
    return str(path)


def lum(*words: str) -> tuple[str, ...]:
    return sys.executable, "-m", "luminosity.cli.main", *words


def test_breakpoint_opens_the_debugger(script: str) -> None:
    with terminal(*lum("run", script, "--debug")) as screen:
        stopped_at = "breakpoint()" if sys.version_info >= (3, 13) else "return doubled"
        assert f"-> {stopped_at}" in screen.wait_for("(Pdb) ")
        screen.type("p doubled")
        assert "42" in screen.wait_for("(Pdb) ")
        screen.type("p __import__('psutil').Process().children(recursive=True)")
        assert screen.wait_for("(Pdb) ").splitlines()[1] == "[]"
        screen.type("continue")
        screen.wait_for("gives 42")
        screen.wait_for("the end")
        assert screen.exit_code() == 0


def test_leaving_the_debugger_ends_the_run(script: str) -> None:
    with terminal(*lum("run", script, "--debug")) as screen:
        screen.wait_for("(Pdb) ")
        screen.type("quit")
        screen.wait_for("lum run: the user quit the debugger")
        assert screen.exit_code() == 1


def test_ctrl_c_at_a_terminal_ends_the_run(tmp_path: Path) -> None:
    script = tmp_path / "pipeline.py"
    script.write_text(_PIPELINE.replace("breakpoint()", "import time; print('waits'); time.sleep(60)"))
    with terminal(*lum("run", str(script), "--debug")) as screen:
        screen.wait_for("waits")
        screen.interrupt()
        screen.wait_for("lum run: interrupted")
        assert screen.exit_code() == 130


def test_no_process_is_started_where_the_command_line_says_debug(tmp_path: Path) -> None:
    script = tmp_path / "pipeline.py"
    script.write_text(
        _PIPELINE.replace("breakpoint()", "import psutil; print('children', psutil.Process().children(recursive=True))")
    )
    done = subprocess.run(
        [sys.executable, str(script), "--runner=luminosity.LuminosityRunner", "--debug"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "children []\ngives 42\nthe end\n"


# ---- where user code runs


def notice(x: int) -> int:
    _SEEN.append((x, os.getpid(), threading.current_thread(), WorkerShare.current(), dict(os.environ)))
    return x


def test_user_code_runs_on_the_callers_thread_whatever_its_hints() -> None:
    environment = dict(os.environ)
    noticing = beam.Map(notice).with_resource_hints(accelerator="type:any;count:9", min_ram="9000GB", cpu_count="900")
    result = start(lambda p: p | beam.Create([1, 2]) | beam.Reshuffle() | noticing, "--debug")
    assert result.state == PipelineState.DONE  # without a wait
    share = WorkerShare.current()
    here = threading.main_thread()
    assert sorted(x for x, *_ in _SEEN) == [1, 2]
    for _, *where in _SEEN:
        assert where == [os.getpid(), here, share, environment]


class OneBundleAtATime(beam.DoFn):
    running = 0

    def start_bundle(self) -> None:
        OneBundleAtATime.running += 1
        _SEEN.append(OneBundleAtATime.running)

    def process(self, element: int) -> Iterable[int]:
        yield element

    def finish_bundle(self) -> None:
        OneBundleAtATime.running -= 1


def test_one_bundle_runs_at_a_time() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | beam.Create(range(5_000)) | "1" >> beam.Reshuffle() | "A" >> beam.ParDo(OneBundleAtATime())
        hinted = beam.ParDo(OneBundleAtATime()).with_resource_hints(max_active_bundles_per_worker="8")
        numbers | "2" >> beam.Reshuffle() | "B" >> hinted

    run(build, "--debug", "--cpu_workers=4")
    assert len(_SEEN) >= 4
    assert set(_SEEN) == {1}


class Paired(beam.DoFn):
    def setup(self) -> None:
        _SEEN.append("up")

    def process(self, element: int) -> Iterable[float]:
        yield 1 / element

    def teardown(self) -> None:
        _SEEN.append("down")


def test_what_is_set_up_is_torn_down() -> None:
    run(lambda p: p | beam.Create([1]) | beam.ParDo(Paired()), "--debug")
    assert _SEEN == ["up", "down"]
    with pytest.raises(StepFailed):
        run(lambda p: p | beam.Create([1, 0]) | beam.Reshuffle() | beam.ParDo(Paired()), "--debug")
    assert _SEEN == ["up", "down", "up", "down"]


def say(x: int) -> int:
    logging.getLogger("tests.said").warning("have %d", x)
    return x


def test_logs_are_plain_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(lambda p: p | beam.Create([1]) | beam.Map(say), "--debug")
        with pytest.raises(StepFailed):
            run(lambda p: p | beam.Create([2]) | beam.Map(say) | beam.Map(fail), "--debug")
    building = ("root", "apache_beam.typehints.native_type_compatibility")  # what Beam says of any pipeline
    said = [(r.name, r.levelname, r.getMessage()) for r in caplog.records if r.name not in building]
    assert said == [("tests.said", "WARNING", "have 1"), ("tests.said", "WARNING", "have 2")]


# ---- what comes out


@pytest.mark.parametrize("window_s", [None, 7])
def test_results_are_those_of_beams_own_runner(tmp_path: Path, window_s: int | None) -> None:
    recipe = Recipe(tuple(range(20)), window_s, tuple((name, 3) for name in OPERATIONS if name != "gather"))
    gathering = Recipe(tuple(range(20)), window_s, (("map", 1), ("gather", 3), ("group", 2)))
    for each in (recipe, gathering):
        wanted = collect(each.build, tmp_path, beam.Pipeline(runner=FnApiRunner()))
        assert Counter(collect(each.build, tmp_path, new_pipeline("--debug"))) == Counter(wanted)


def count(x: int) -> None:
    Metrics.counter("test", "seen").inc()


def test_metrics_are_counted() -> None:
    result = run(lambda p: p | beam.Create(range(20)) | beam.Map(count), "--debug")
    found = result.metrics().query(MetricsFilter().with_namespace("test"))["counters"]
    assert [metric.committed for metric in found] == [20]


# ---- what fails


class Unusual(Exception):
    """An exception that Beam can't copy with a longer message."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)


def fail(x: str) -> None:
    _SEEN.append(x)
    raise Unusual(7, "no good")


def test_the_users_own_exception_is_the_cause() -> None:
    line = inspect.getsourcelines(fail)[1] + 2
    with pytest.raises(StepFailed) as caught:
        run(lambda p: p | beam.Create(["the one"]) | "Failing step" >> beam.Map(fail), "--debug")
    assert _SEEN == ["the one"]
    cause = caught.value.__cause__
    assert isinstance(cause, Unusual)
    assert cause.args == (7, "no good")
    assert [f.name for f in traceback.extract_tb(cause.__traceback__)][-1] == "fail"
    summary = str(caught.value).splitlines()[:3]
    assert summary == [
        "step 'Failing step' failed: Unusual: (7, 'no good')",
        f"  at {__file__}:{line}",
        "  element: 'the one'",
    ]


def interrupt(x: int) -> None:
    signal.raise_signal(signal.SIGINT)


def leave_the_debugger(x: int) -> None:
    raise bdb.BdbQuit


def leave(x: int) -> None:
    sys.exit("enough")


@pytest.mark.parametrize(("end", "raised"), [(interrupt, KeyboardInterrupt), (leave_the_debugger, RunCancelled)])
def test_who_wants_to_stop_is_not_kept(end: Any, raised: type[BaseException]) -> None:
    with pytest.raises(raised):
        start(lambda p: p | beam.Create([1]) | beam.Map(end), "--debug")  # without a wait


def dump_what_only_the_script_has(x: int) -> None:
    def square(number: int) -> int:
        return number * number

    square.__module__, square.__qualname__ = "__main__", "square"
    pickle.dumps(square)


def test_a_function_of_the_script_that_another_process_cannot_find_is_explained() -> None:
    with pytest.raises(StepFailed, match="on __main__ failed") as caught:
        run(lambda p: p | beam.Create([1]) | beam.Map(dump_what_only_the_script_has), "--debug")
    assert "move what it names from your script or notebook into a module" in str(caught.value)


def test_a_step_that_exits_has_failed() -> None:
    with pytest.raises(StepFailed, match="SystemExit: enough"):
        run(lambda p: p | beam.Create([1]) | beam.Map(leave), "--debug")
