"""A pipeline that does nothing: its first run in a fresh process, and the next one."""

from __future__ import annotations

from collections.abc import Callable

import _measure
import apache_beam as beam


def build(pipeline: beam.Pipeline) -> None:
    pipeline | beam.Create([1]) | beam.Map(lambda x: x)


def twice(run: Callable[[], float]) -> dict[str, float]:
    return {"first run (s)": run(), "next run (s)": run()}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    _measure.print_figure("seconds, first run", results["Luminosity"]["first run (s)"], at_most=1.5)
    _measure.print_figure("seconds, next run", results["Luminosity"]["next run (s)"], at_most=0.3)


if __name__ == "__main__":
    sides: dict[str, _measure.Side] = {
        "Luminosity": lambda: twice(lambda: _measure.run_ours(build, "--cpu_workers=2")),
        "FnApiRunner": lambda: twice(lambda: _measure.run_beams(build)),
    }
    _measure.main(sides, report, rounds=5)
