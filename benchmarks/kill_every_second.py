"""A job of 60 s whose workers are killed, one every second: the result is exact, and how long it takes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import _measure
import apache_beam as beam

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.processes import kill_workers_of

_ELEMENTS = 1_200
_SECONDS_EACH = 0.1
_WORKERS = 2


def work(x: int) -> int:
    time.sleep(_SECONDS_EACH)
    return x


def build(pipeline: beam.Pipeline) -> None:
    elements = pipeline | beam.Create(range(_ELEMENTS)) | beam.Reshuffle() | "Work" >> beam.Map(work)
    _measure.check_count_and_sum(elements, _ELEMENTS, sum(range(_ELEMENTS)))  # a wrong result fails the run


def undisturbed() -> dict[str, float]:
    return {"seconds": _measure.run_ours(build, f"--cpu_workers={_WORKERS}"), "kills": 0}


def disturbed() -> dict[str, float]:
    with kill_workers_of(os.getpid(), every_s=1.0) as kills:
        measured = undisturbed()
    return {**measured, "kills": kills.count}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    ratio = results["a kill a second"]["seconds"] / results["undisturbed"]["seconds"]
    print(f"exact on both sides; with kills it took {ratio:.2f} times as long")


if __name__ == "__main__":
    _measure.main({"undisturbed": undisturbed, "a kill a second": disturbed}, report)
