"""Tests of runs that spill while workers or the runner die, or while the disk is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path

import apache_beam as beam
import psutil
import pytest

from luminosity.errors import SpillFailed
from tests.marks import note, wait_for_file
from tests.processes import MOST_KILLS, files_of_runs, kill_workers_of, wait_for
from tests.runners import IS_REFERENCE, collect_all, new_pipeline, run

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing"),
]

_SMALL_BUDGET = "--memory_budget=2MB"


def noise(number: int) -> Iterable[tuple[int, bytes]]:
    """Yield 400 kB that can't be compressed, in small steps."""
    for index in range(8):
        time.sleep(0.01)
        yield index % 3, number.to_bytes(2, "big") + os.urandom(50_000)


def numbers_of(key: int, values: Iterable[bytes]) -> tuple[int, list[int]]:
    return key, sorted(int.from_bytes(value[:2], "big") for value in values)


def late(pair: tuple[int, bytes], count: int) -> tuple[int, int, int]:
    return pair[0], int.from_bytes(pair[1][:2], "big"), count


def test_results_are_exact_while_workers_are_killed_and_blocks_are_on_disk(tmp_path: Path) -> None:
    spill, at_work, killed = tmp_path / "spill", tmp_path / "at-work", tmp_path / "killed"

    def noise_at_work(number: int) -> Iterable[tuple[int, bytes]]:
        note(at_work, os.getpid())
        if number == 59:
            wait_for_file(killed)
        yield from noise(number)

    def build(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
        pairs = pipeline | beam.Create(range(60)) | beam.Reshuffle() | beam.FlatMap(noise_at_work)
        waits_for_all = beam.pvalue.AsSingleton(pairs | beam.combiners.Count.Globally())
        return {
            "groups": pairs | beam.GroupByKey() | beam.MapTuple(numbers_of),
            "elements": pairs | "late" >> beam.Map(late, waits_for_all),
        }

    with kill_workers_of(os.getpid(), every_s=0.7, at_work=at_work, over=killed) as kills:
        found, _ = collect_all(build, tmp_path, new_pipeline(_SMALL_BUDGET, f"--spill_dir={spill}"))
    assert kills.count == MOST_KILLS
    keys = [index % 3 for index in range(8)]
    assert sorted(found["groups"]) == [(key, sorted(list(range(60)) * keys.count(key))) for key in range(3)]
    assert sorted(found["elements"]) == sorted((key, number, 480) for number in range(60) for key in keys)
    assert list(spill.iterdir()) == []


_IN_RAY = pytest.mark.one_machine("Ray keeps and spills the blocks of workers")


@pytest.mark.parametrize("who", ["runner", pytest.param("worker", marks=_IN_RAY)])
def test_a_full_disk_is_a_clear_error(one_megabyte: Path, who: str) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        pairs = pipeline | beam.Create(range(60))
        if who == "worker":
            _ = pairs | beam.FlatMap(lambda n: ((n, os.urandom(100_000)) for _ in range(100))) | beam.Reshuffle()
        else:
            _ = pairs | beam.FlatMap(lambda n: ((n, os.urandom(1000)) for _ in range(100))) | beam.GroupByKey()

    budget = "--memory_budget=2MB" if who == "worker" else "--memory_budget=1MB"
    with pytest.raises(SpillFailed, match=r"the disk is full: no room in .*small.* free.*--spill_dir"):
        run(build, budget, f"--spill_dir={one_megabyte}")
    assert os.listdir(one_megabyte) == []


_SPILLING_RUN = """
    import os, sys, time
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
    from luminosity import LuminosityRunner

    def slow(pair):
        time.sleep(0.05)
        return pair

    options = PipelineOptions(["--memory_budget=2MB", "--progress=off", "--spill_dir=" + sys.argv[1]])
    with beam.Pipeline(runner=LuminosityRunner(), options=options) as pipeline:
        pairs = pipeline | beam.Create(range(10_000)) | beam.FlatMap(lambda n: [(n, os.urandom(100_000))])
        pairs | beam.Map(slow) | beam.GroupByKey()
"""


@pytest.mark.one_machine("looks at processes that the runner has started")
def test_a_runner_that_is_killed_leaves_nothing_on_the_disk_for_long(tmp_path: Path) -> None:
    script, spill, temporary = tmp_path / "script.py", tmp_path / "spill", tmp_path / "tmp"
    temporary.mkdir()
    script.write_text(textwrap.dedent(_SPILLING_RUN))
    shared_memory = files_of_runs("/dev/shm")
    process = subprocess.Popen(
        [sys.executable, str(script), str(spill)], env={**os.environ, "TMPDIR": str(temporary)}, start_new_session=True
    )
    try:
        assert wait_for(lambda: list(spill.glob("luminosity-*/*spill*")) + list(spill.glob("*/*.packed")), timeout_s=60)
        descendants = psutil.Process(process.pid).children(recursive=True)
        killed = [process.pid, *(d.pid for d in descendants if "forkserver" in " ".join(d.cmdline()))]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # all stop first, so that none can clean up after another
            for pid in killed:
                os.kill(pid, number)
        process.wait(timeout=60)
        assert psutil.wait_procs(descendants, timeout=60)[1] == []
    finally:
        process.kill()
        process.wait(timeout=60)
    assert list(spill.iterdir()) != []
    run(lambda p: p | beam.Create([1]), f"--spill_dir={spill}")
    assert list(spill.iterdir()) == []
    assert files_of_runs("/dev/shm") - shared_memory == set()
