"""One shared host for all workers of a machine: all find it, it survives kills, and it ends with the last worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import psutil
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import create_runner

from luminosity import Handler, RunInference
from tests.marks import note, notes

pytestmark = pytest.mark.thorough

_PATIENCE_S = 120
TWO_PROCESSES = {
    "fnapi": ("FnApiRunner", ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]),
    "luminosity": ("luminosity.LuminosityRunner", ["--progress=off", "--cpu_workers=2"]),
}


_MARK = "TEST_OF_MACHINE_HOST"
"""In the environment of a test's processes: others on this machine may test, too."""
on_both_runners = pytest.mark.parametrize("run", TWO_PROCESSES, indirect=True)


@pytest.fixture(autouse=True)
def _marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_MARK, uuid.uuid4().hex)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[Any]]:
    """Runs a transform in two worker processes, returns its output, and checks that no host is left."""
    runner, flags = TWO_PROCESSES[getattr(request, "param", "luminosity")]

    def results(examples: list[Any], transform: Any, *more: str) -> list[Any]:
        with beam.Pipeline(create_runner(runner), PipelineOptions([*flags, *more])) as pipeline:
            predicted = pipeline | beam.Create(examples) | beam.Reshuffle() | transform
            _ = predicted | beam.Map(_line) | beam.io.WriteToText(str(tmp_path / "results"))
        until(lambda: not hosts())
        return [json.loads(line) for part in tmp_path.glob("results*") for line in part.read_text().splitlines()]

    return results


def _line(result: Any) -> str:
    key, predicted = result if type(result) is tuple else (None, result)
    # The worker reports itself, too.
    return json.dumps([key, predicted.example, predicted.inference, os.getpid(), psutil.Process().memory_info().rss])


def hosts() -> list[psutil.Process]:
    """Return the host processes of this test that are alive."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        if "luminosity.inference.ipc" in (process.info["cmdline"] or []):
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == os.environ[_MARK]:
                    found.append(process)
    return found


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


class Where(Handler[int, Any, Any]):
    """Predicts the id of its process, and notes each load."""

    def __init__(self, log: Path, seconds: float = 0.0, megabytes: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self._log, self._seconds, self._megabytes = log, seconds, megabytes

    def load_model(self) -> Any:
        with open(self._log, "a") as file:
            file.write(f"{os.getpid()}\n")
        return np.ones(self._megabytes * 1_000_000 // 8)

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        time.sleep(self._seconds)
        return [[2 * example, os.getpid(), psutil.Process().memory_info().rss] for example in batch]


def loads(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().splitlines()]


def test_two_workers_hold_a_large_model_once(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    log = tmp_path / "log"
    handler = Where(log, seconds=0.005, megabytes=500, max_batch_size=10, large_model=True)
    found = run(list(range(2000)), RunInference(handler))
    assert sorted((example, value) for _, example, (value, *_), *_ in found) == [(n, 2 * n) for n in range(2000)]
    (host,) = {pid for _, _, (_, pid, _), *_ in found}
    workers = {pid for *_, pid, _ in found}
    assert loads(log) == [host]
    assert host not in workers
    assert max(size for _, _, (*_, size), *_ in found) > 500_000_000
    assert max(size for *_, size in found) < 450_000_000, "a worker has loaded the model, too"


@pytest.fixture
def killer() -> Iterator[Callable[[Path, int], list[int]]]:
    """Kill the host after every hundred examples, this many times."""
    stop, killed = threading.Event(), list[int]()

    def start(log: Path, times: int) -> list[int]:
        def kill() -> None:
            while len(killed) < times and not stop.wait(0.05):
                if len(notes(f"{log}.progress")) >= 100 * (len(killed) + 1):
                    for host in hosts()[:1]:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            host.send_signal(signal.SIGKILL)
                            killed.append(host.pid)
                            note(f"{log}.killed")

        threading.Thread(target=kill, daemon=True).start()
        return killed

    yield start
    stop.set()


class Counted(Where):
    """Counts examples, and waits if it is ahead of the killing thread."""

    def __init__(self, log: Path, deaths: int, **options: Any) -> None:
        super().__init__(log, **options)
        self._deaths = deaths

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        found = super().predict(model, batch)
        for _ in batch:
            note(f"{self._log}.progress")
        until(lambda: not self._is_to_be_killed())
        return found

    def _is_to_be_killed(self) -> bool:
        deaths = len(notes(f"{self._log}.killed"))
        return deaths < self._deaths and len(notes(f"{self._log}.progress")) >= 100 * (deaths + 1)


class InHost(Where):
    """Predicts whether it computes in a host process. A large model tells its size, which no other thread disturbs."""

    def memory(self, model: Any) -> int | None:
        return model.nbytes or None

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        is_host = "luminosity.inference.ipc" in psutil.Process().cmdline()
        return [[2 * example, os.getpid(), is_host] for example in batch]


def test_the_worker_that_has_the_device_is_the_host(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    log = tmp_path / "log"
    transform = RunInference(InHost(log, large_model=True))
    found = run(list(range(20)), transform.with_resource_hints(accelerator="type:any;count:1"), "--accelerators=1")
    assert sorted((example, value) for _, example, (value, *_), *_ in found) == [(n, 2 * n) for n in range(20)]
    assert {(pid, is_host) for _, _, (_, pid, is_host), *_ in found} == {(pid, False) for pid in loads(log)}
    assert len(loads(log)) == 1


@on_both_runners
@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_again_and_again_and_every_result_comes_once(
    times: int, run: Callable[..., list[Any]], killer: Callable[[Path, int], list[int]], tmp_path: Path
) -> None:
    log, count = tmp_path / "log", 200 * times
    handler = Counted(log, times, seconds=0.01, max_batch_size=4, large_model=True)
    killed = killer(log, times)
    found = run(list(range(count)), RunInference(handler))
    assert sorted((example, value) for _, example, (value, *_), *_ in found) == [(n, 2 * n) for n in range(count)]
    assert len(killed) == times
    assert len(loads(log)) >= times
    assert not set(loads(log)) & {pid for *_, pid, _ in found}, "a worker has loaded the model, too"


def test_models_of_keys_meet_in_one_host(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    log = tmp_path / "log"
    handler = KeyedModelHandler([KeyModelMapping([f"k{n}"], Where(log, large_model=True)) for n in range(3)])
    found = run([(f"k{n % 3}", n) for n in range(300)], RunInference(handler))
    assert sorted((key, example, value) for key, example, (value, *_), *_ in found) == sorted(
        (f"k{n % 3}", n, 2 * n) for n in range(300)
    )
    assert len(loads(log)) == 3
    assert len(set(loads(log))) == 1


def test_each_worker_loads_small_models_of_keys(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    log = tmp_path / "log"
    handler = KeyedModelHandler([KeyModelMapping([f"k{n}"], InHost(log)) for n in range(3)])
    found = run([(f"k{n % 3}", n) for n in range(300)], RunInference(handler))
    assert sorted((key, example, value) for key, example, (value, *_), *_ in found) == sorted(
        (f"k{n % 3}", n, 2 * n) for n in range(300)
    )
    assert not any(is_host for _, _, (*_, is_host), *_ in found)
    assert max(Counter(loads(log)).values()) <= 3


def test_models_of_keys_that_turn_out_large_meet_in_one_host(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    log = tmp_path / "log"
    handler = KeyedModelHandler([KeyModelMapping([f"k{n}"], InHost(log, megabytes=60)) for n in range(3)])
    # A quarter of the budget is for the small models of each worker.
    found = run([(f"k{n % 3}", n) for n in range(300)], RunInference(handler), "--model_memory_budget=230MB")
    assert sorted((key, example, value) for key, example, (value, *_), *_ in found) == sorted(
        (f"k{n % 3}", n, 2 * n) for n in range(300)
    )
    (host,) = {pid for _, _, (_, pid, is_host), *_ in found if is_host}
    assert all(is_host for _, _, (*_, is_host), *_ in found)
    counts = Counter(loads(log))
    assert counts.pop(host) == 3
    assert sum(counts.values()) == 3, "a model was measured more than once"


class Refuses(Where):
    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        if 13 in batch:
            raise ValueError("thirteen")
        return super().predict(model, batch)


def test_a_failure_in_the_host_belongs_to_its_example_whichever_copy_computes(
    run: Callable[..., list[Any]], tmp_path: Path
) -> None:
    log = tmp_path / "log"

    class Parted(beam.PTransform[Any, Any]):
        def expand(self, input_or_inputs: Any) -> Any:
            handler = Refuses(log, seconds=0.01, max_batch_size=5, large_model=True, model_copies=3)
            good, bad = input_or_inputs | RunInference(handler).with_exception_handling()
            failed = bad.failed_inferences | beam.Map(
                lambda letter: beam.Row(example=letter[0][0], inference=letter[1][1])
            )
            return (good, failed) | beam.Flatten()

    found = run(list(range(100)), Parted())
    assert sorted(example for _, example, *_ in found) == list(range(100))
    assert [text for _, example, text, *_ in found if example == 13] == ["ValueError('thirteen')"]
    assert len(loads(log)) == 3
    assert len(set(loads(log))) == 1


SCRIPT = """
    import dataclasses
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
    from luminosity import Handler, RunInference

    @dataclasses.dataclass
    class Point:
        x: int

    class Mirror(Handler):
        def load_model(self):
            return None

        def predict(self, model, batch, inference_args=None):
            return [Point(-point.x) for point in batch]

    def check(result):
        assert type(result.inference) is Point, type(result.inference)
        print(result.inference)

    if __name__ == "__main__":
        with beam.Pipeline(options=PipelineOptions()) as pipeline:
            _ = pipeline | beam.Create([Point(1), Point(2)]) | RunInference(Mirror(large_model=True)) | beam.Map(check)
"""


def test_classes_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    flags = ["--runner=luminosity.LuminosityRunner", "--cpu_workers=2", "--progress=off"]
    done = subprocess.run([sys.executable, str(script), *flags], capture_output=True, text=True, timeout=_PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "Point(x=-1)", "Point(x=-2)"]
