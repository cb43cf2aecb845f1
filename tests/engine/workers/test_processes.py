"""Tests of the life of runs and workers: spawned workers, runs side by side, runs without a wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import apache_beam as beam
import pytest

from luminosity.engine import folders
from luminosity.engine.workers.launcher import SpawnLauncher
from luminosity.engine.workers.request import WorkerRequest
from tests.runners import IS_REFERENCE, collect, new_pipeline, run

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing"),
]


def sums(pipeline: beam.Pipeline) -> beam.PCollection:
    return pipeline | beam.Create(range(100)) | beam.Map(lambda n: (n % 3, n)) | beam.CombinePerKey(sum)


_SUMS = Counter([(0, 1683), (1, 1617), (2, 1650)])


def test_spawned_workers_give_the_same(tmp_path: Path) -> None:
    assert Counter(collect(sums, tmp_path, new_pipeline("--worker_start=spawn", "--cpu_workers=2"))) == _SUMS


def test_a_spawned_worker_that_dies_before_it_has_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is larger than a pipe's buffer and no process reads it. The exit is reported like any other."""
    ended: Future[int] = Future()
    environment = {"LONG": 100_000 * "x"}
    request = WorkerRequest("w", "", environment, [], "", [], "", "", "", writer=0, main_classes="", private_folders=[])
    monkeypatch.setattr(sys, "executable", "false")
    SpawnLauncher().start(request, ended.set_result)
    assert ended.result(50) == 1


def test_runs_side_by_side_in_one_process(tmp_path: Path) -> None:
    found: dict[int, Counter[object]] = {}

    def run_in(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        found[number] = Counter(collect(sums, folder, new_pipeline("--cpu_workers=1")))

    threads = [threading.Thread(target=run_in, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert found == dict.fromkeys(range(3), _SUMS)


_UNAWAITED = """
import apache_beam as beam
from luminosity import LuminosityRunner

pipeline = beam.Pipeline(runner=LuminosityRunner())
pipeline | beam.Create(range(50)) | beam.Map(str) | beam.io.WriteToText({output!r}, shard_name_template="")
pipeline.run()
"""


def test_a_script_that_does_not_wait_gets_its_results(tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    script = tmp_path / "script.py"
    script.write_text(_UNAWAITED.format(output=str(output)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(map(int, output.read_text().split())) == list(range(50))


def test_setup_and_teardown_are_called_in_pairs(tmp_path: Path) -> None:
    marks = tmp_path / "marks"

    class Paired(beam.DoFn):
        def setup(self) -> None:
            with open(marks, "a") as file:
                file.write("up ")

        def teardown(self) -> None:
            with open(marks, "a") as file:
                file.write("down ")

        def process(self, element: int) -> None:
            pass

    run(lambda p: p | beam.Create(range(20)) | beam.ParDo(Paired()), "--cpu_workers=2")
    counts = Counter(marks.read_text().split())
    assert counts["up"] == counts["down"] >= 1


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server, which would clean up after the runner, is killed too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # otherwise the run of a test beside this one might remove it
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = (
        "import os, signal\n"
        "from luminosity.engine.folders import RunFolders\n"
        "folders = RunFolders()\n"
        "print(folders.spill, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    left = killed.stdout.strip()
    assert os.listdir(tmp_path) == [os.path.basename(left)]
    run(lambda p: p | beam.Create([1]), "--cpu_workers=1")
    assert os.listdir(tmp_path) == []


_UNHEARD = """
import apache_beam as beam
from luminosity import LuminosityRunner

pipeline = beam.Pipeline(runner=LuminosityRunner())
pipeline | beam.Create([0]) | "Divide" >> beam.Map(lambda x: 1 / x)
pipeline.run()
print("the script ends")
"""


def test_a_folder_that_another_run_takes_for_abandoned_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    with contextlib.ExitStack() as others:

        def make(prefix: str, dir: str) -> str:
            folder = tmp_path / f"{prefix}{len(made)}"
            folder.mkdir()
            if not made:
                lock = others.enter_context((folder / "lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            made.append(str(folder))
            return made[-1]

        monkeypatch.setattr(folders.tempfile, "mkdtemp", make)
        run_folders = folders.RunFolders()
    assert made[0] not in run_folders.all
    assert made[1:] == run_folders.all
    run_folders.remove()


def test_a_failure_that_nobody_waits_for_is_told_all_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_UNHEARD)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout == "the script ends\n"
    assert "step 'Divide' failed 4 times: ZeroDivisionError" in done.stderr
    assert done.returncode == 1


_LOGS = """
import logging
import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from luminosity import LuminosityRunner

def say(x):
    logging.getLogger("mine").info("hello %s", x)
    logging.getLogger("noisy").info("noise")
    return x

logging.basicConfig(level=30, format="%(levelname)s %(name)s %(filename)s:%(lineno)d %(message)s", force=True)
logging.getLogger("mine").setLevel(logging.INFO)
with beam.Pipeline(runner=LuminosityRunner(), options=PipelineOptions(["--progress=off"])) as pipeline:
    pipeline | beam.Create([1]) | beam.Map(say)
"""


def test_what_workers_log_keeps_its_name_level_and_place(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_LOGS)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False)
    lines = [line for line in done.stderr.splitlines() if "apitools" not in line]
    assert lines == ["INFO mine script.py:8 hello 1"]


@pytest.mark.usefixtures("patient_sinks")
def test_little_output_is_one_file(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        words = pipeline | beam.Create(["a", "b", "c"] * 20) | beam.combiners.Count.PerElement()
        _ = words | beam.Reshuffle() | beam.Map(str) | beam.io.WriteToText(str(tmp_path / "out"))

    run(build, "--cpu_workers=2")
    assert [path.name for path in tmp_path.iterdir()] == ["out-00000-of-00001"]


_MAIN_CLASSES = """
import dataclasses
import apache_beam as beam
from luminosity import LuminosityRunner

@dataclasses.dataclass(frozen=True)
class Item:
    number: int

def is_item(x):
    return isinstance(x, Item)

if __name__ == "__main__":
    with beam.Pipeline(runner=LuminosityRunner()) as pipeline:
        made = pipeline | "Numbers" >> beam.Create([1, 2]) | beam.Map(lambda n: Item(n))
        given = pipeline | "Items" >> beam.Create([Item(3), Item(4)])
        (made, given) | beam.Flatten() | beam.Reshuffle() | beam.Filter(is_item) | beam.Map(print)
"""


def test_classes_of_the_script_are_known_to_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_MAIN_CLASSES)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False)
    assert sorted(done.stdout.split()) == [f"Item(number={n})" for n in (1, 2, 3, 4)], done.stderr
