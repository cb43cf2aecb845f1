"""Tests of several runs in one process: in sequence, side by side, with one that fails or is cancelled."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import psutil
import pytest
from apache_beam.runners.runner import PipelineResult, PipelineState

from luminosity.errors import StepFailed
from tests.marks import note, wait_for_file
from tests.processes import files_of, wait_for
from tests.runners import IS_REFERENCE, finished, new_pipeline, run, start

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing"),
]


def write_sums(pipeline: beam.Pipeline, output: Path) -> Any:
    pairs = pipeline | beam.Create(range(100)) | beam.Map(lambda n: (n % 3, n))
    lines = pairs | beam.GroupByKey() | beam.MapTuple(lambda key, numbers: f"{key} {sum(numbers)}")
    return lines | beam.io.WriteToText(str(output), shard_name_template="")


_SUMS = ["0 1683", "1 1617", "2 1650"]


def sums_in(output: Path) -> list[str]:
    return sorted(output.read_text().splitlines())


def started_and_held(tmp_path: Path, name: str) -> tuple[PipelineResult, Callable[[], None]]:
    """Start a run that waits. Returns it and a function that lets it continue and write the sums to ``name``."""
    started, release = tmp_path / f"{name}-started", tmp_path / f"{name}-release"

    def hold(_: bytes) -> None:
        note(started)
        wait_for_file(release)

    def build(pipeline: beam.Pipeline) -> None:
        held = pipeline | "Impulse" >> beam.Impulse() | "Hold" >> beam.Map(hold)
        numbers = held | beam.FlatMap(lambda _: range(100)) | beam.Map(lambda n: (n % 3, n))
        lines = numbers | beam.GroupByKey() | beam.MapTuple(lambda key, group: f"{key} {sum(group)}")
        _ = lines | beam.io.WriteToText(str(tmp_path / name), shard_name_template="")

    result = start(build, "--cpu_workers=1")
    assert wait_for(started.exists, timeout_s=60)
    return result, release.touch


def test_a_pipeline_that_is_run_twice(tmp_path: Path) -> None:
    output = tmp_path / "sums"
    pipeline = new_pipeline("--cpu_workers=1")
    write_sums(pipeline, output)
    for _ in range(2):
        assert finished(pipeline.run()).state == PipelineState.DONE
        assert sums_in(output) == _SUMS
        output.unlink()


def test_runs_that_are_started_without_waiting_for_one_another(tmp_path: Path) -> None:
    (first, release_first), (second, release_second) = (started_and_held(tmp_path, name) for name in ("a", "b"))
    release_second()
    assert finished(second).state == PipelineState.DONE
    assert first.state == PipelineState.RUNNING
    release_first()
    assert finished(first).state == PipelineState.DONE
    assert sums_in(tmp_path / "a") == sums_in(tmp_path / "b") == _SUMS


def test_a_run_that_fails_does_no_harm_to_another(tmp_path: Path) -> None:
    healthy, release = started_and_held(tmp_path, "healthy")
    with pytest.raises(StepFailed, match="ZeroDivisionError"):
        run(lambda p: p | beam.Create([0]) | beam.Map(lambda n: 1 / n), "--cpu_workers=1")
    with pytest.raises(StepFailed, match="ZeroDivisionError"):
        run(lambda p: p | beam.Create([0]) | beam.Map(lambda n: 1 / n), "--cpu_workers=1", "--worker_start=spawn")
    assert healthy.state == PipelineState.RUNNING
    release()
    assert finished(healthy).state == PipelineState.DONE
    assert sums_in(tmp_path / "healthy") == _SUMS


def test_a_run_that_is_cancelled_does_no_harm_to_another(tmp_path: Path) -> None:
    healthy, release = started_and_held(tmp_path, "healthy")
    cancelled, _ = started_and_held(tmp_path, "cancelled")
    assert cancelled.cancel() == PipelineState.CANCELLED
    assert healthy.state == PipelineState.RUNNING
    release()
    assert finished(healthy).state == PipelineState.DONE
    assert sums_in(tmp_path / "healthy") == _SUMS
    assert not (tmp_path / "cancelled").exists()


def test_a_run_whose_worker_dies_does_no_harm_to_another(tmp_path: Path) -> None:
    healthy, release = started_and_held(tmp_path, "healthy")
    with pytest.raises(RuntimeError, match="exited with code 3"):
        run(lambda p: p | beam.Create([0]) | beam.Map(lambda _: os._exit(3)), "--cpu_workers=1")
    release()
    assert finished(healthy).state == PipelineState.DONE
    assert sums_in(tmp_path / "healthy") == _SUMS


def _of_python() -> Counter[str]:
    """Count what only the engine and user code make."""
    return Counter(
        threads=threading.active_count(),
        processes=len(psutil.Process().children(recursive=True)),
        folders=len(files_of(os.getpid())),
    )


def _of_the_system() -> Counter[str]:
    """Count what gRPC makes too: a few threads and files, which it drops after some runs and makes again."""
    return Counter(threads=psutil.Process().num_threads(), files=psutil.Process().num_fds())


@pytest.mark.parametrize(("worker_start", "rounds"), [("fork", 10), pytest.param("spawn", 4, marks=pytest.mark.slow)])
def test_many_runs_leave_nothing_that_grows(worker_start: str, rounds: int, tmp_path: Path) -> None:
    flags = ("--cpu_workers=1", f"--worker_start={worker_start}")

    def two_runs() -> None:
        run(lambda p: write_sums(p, tmp_path / "sums"), *flags)
        with pytest.raises(StepFailed):
            run(lambda p: p | beam.Create([0]) | beam.Map(lambda n: 1 / n), *flags)

    two_runs()  # makes what is made once, at the first use
    of_python, of_the_system = _of_python(), _of_the_system()
    for _ in range(rounds):
        two_runs()
    wait_for(lambda: not _of_python() - of_python, timeout_s=60)
    assert _of_python() - of_python == Counter()

    def grown() -> dict[str, int]:
        return {kind: n for kind, n in (_of_the_system() - of_the_system).items() if n >= 2 * rounds}

    wait_for(lambda: not grown(), timeout_s=60)
    assert grown() == {}


def test_a_failed_run_is_forgotten_once_its_failure_is_told() -> None:
    def failed() -> weakref.ref[PipelineResult]:
        result = start(lambda p: p | beam.Create([0]) | beam.Map(lambda n: 1 / n), "--cpu_workers=1")
        with pytest.raises(StepFailed):
            result.wait_until_finish()
        return weakref.ref(result)

    result = failed()

    def is_forgotten() -> bool:
        gc.collect()
        return result() is None

    assert wait_for(is_forgotten, timeout_s=60)  # its thread may be about to end
