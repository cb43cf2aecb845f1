"""A CPU step and an accelerator step of 5 ms each, one worker each: both against one alone."""

from __future__ import annotations

import time

import _measure
import apache_beam as beam

_ELEMENTS = 1_000
_SECONDS_EACH = 0.005
_FLAGS = ("--cpu_workers=1", "--accelerators=1")


def work(x: int) -> int:
    time.sleep(_SECONDS_EACH)
    return x


def build(pipeline: beam.Pipeline, with_cpu_step: bool) -> None:
    elements = pipeline | beam.Create(range(_ELEMENTS)) | beam.Reshuffle()
    if with_cpu_step:
        elements |= "CPU step" >> beam.Map(work)
    hinted = beam.Map(work).with_resource_hints(accelerator="type:nvidia-tesla-t4;count:1")
    _measure.check_count_and_sum(elements | "Accelerator step" >> hinted, _ELEMENTS, sum(range(_ELEMENTS)))


def seconds(with_cpu_step: bool) -> dict[str, float]:
    return {"seconds": _measure.run_ours(lambda pipeline: build(pipeline, with_cpu_step), *_FLAGS)}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    ratio = results["both steps"]["seconds"] / results["one step alone"]["seconds"]
    _measure.print_figure("of one step's time", ratio, at_most=1.05)


if __name__ == "__main__":
    sides: dict[str, _measure.Side] = {
        "both steps": lambda: seconds(with_cpu_step=True),
        "one step alone": lambda: seconds(with_cpu_step=False),
    }
    _measure.main(sides, report, rounds=3)
