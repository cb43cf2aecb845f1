"""What the benchmarks share: sides measured in turn, each in a fresh process, and a table of the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

Side = Callable[[], dict[str, float]]  # what was measured, by name; mostly {"seconds": …}
Results = dict[str, dict[str, float]]  # medians, by side and name

_SIDE_TIMEOUT_S = 900


def run_ours(build: Callable[[beam.Pipeline], Any], *flags: str) -> float:
    """The seconds from `run()` to the end, on Luminosity."""
    from luminosity import LuminosityRunner

    return _run(build, beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", *flags])))


def run_beams(build: Callable[[beam.Pipeline], Any], *flags: str) -> float:
    """The same on Beam's own local runner."""
    return _run(build, beam.Pipeline(FnApiRunner(), PipelineOptions(list(flags))))


def run_direct(build: Callable[[beam.Pipeline], Any], *flags: str) -> float:
    """Return the same on Beam's DirectRunner."""
    return _run(build, beam.Pipeline("DirectRunner", PipelineOptions(list(flags))))


def main(sides: dict[str, Side], report: Callable[[Results], None], rounds: int = 1) -> None:
    """Measure all sides `rounds` times in turn and report the medians.

    Each measurement is a child process that is started with the name of its side.
    """
    if len(sys.argv) > 1:
        print(json.dumps(sides[sys.argv[1]]()), flush=True)
        return
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, results in measured.items():
            try:
                results.append(_in_fresh_process(name))
            except (subprocess.SubprocessError, ValueError, StopIteration) as error:
                print(f"FAILED: {name}: {error}")
                return
    report({name: medians(results) for name, results in measured.items()})


def medians(results: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the rounds."""
    return {name: median(result[name] for result in results) for name in results[0]}


def print_table(results: Results) -> None:
    columns = list(dict.fromkeys(column for values in results.values() for column in values))
    width = max(map(len, results))
    print(" " * width, *(f"{column:>14}" for column in columns))
    for name, values in results.items():
        print(f"{name:{width}}", *(f"{values[c]:14.2f}" if c in values else " " * 14 for c in columns))


def print_figure(what: str, value: float, at_most: float | None = None, at_least: float | None = None) -> None:
    """A figure beside its target, if it has one. A miss is told, not raised: other machines have other figures."""
    if at_most is None and at_least is None:
        print(f"{what}: {value:.2f}")
        return
    target = f"at most {at_most}" if at_most is not None else f"at least {at_least}"
    is_met = value <= at_most if at_most is not None else value >= (at_least or 0)
    print(f"{what}: {value:.2f} (target: {target}; {'met' if is_met else 'MISSED'})")


class Figure(NamedTuple):
    """A measured number, and its target if it has one."""

    what: str
    value: float | None
    """None: it could not be measured; the note says why."""
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return what a table shows: the name, the number, the target, whether it is met, and the note."""
        found = "-" if self.value is None else _number(self.value)
        if self.at_least is None and self.at_most is None:
            return self.what, found, "", "", self.note
        bound = self.at_most if self.at_least is None else self.at_least
        target = f"{'≤' if self.at_least is None else '≥'} {_number(bound or 0)}"
        if self.value is None:
            return self.what, found, target, "", self.note
        is_met = self.value <= self.at_most if self.at_most is not None else self.value >= (self.at_least or 0)
        return self.what, found, target, "met" if is_met else "MISSED", self.note


def print_figures(figures: Iterable[Figure]) -> None:
    """Print a table of figures beside their targets."""
    rows = [("", "measured", "target", "", ""), *(figure.cells() for figure in figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for what, found, target, verdict, note in rows:
        line = f"{what:{widths[0]}}  {found:>{widths[1]}}  {target:>{widths[2]}}  {verdict:{widths[3]}}  {note}"
        print(line.rstrip(), flush=True)


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.6f}" if 0.99 < value < 1 else f"{value:.3g}"


class CountAndSum(beam.CombineFn):
    """The number of integers and their sum."""

    def create_accumulator(self) -> tuple[int, int]:
        return 0, 0

    def add_input(self, accumulator: tuple[int, int], element: int) -> tuple[int, int]:
        return accumulator[0] + 1, accumulator[1] + element

    def merge_accumulators(self, accumulators: Iterable[tuple[int, int]]) -> tuple[int, int]:
        counts, sums = zip(*accumulators, strict=True)
        return sum(counts), sum(sums)

    def extract_output(self, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator


def check_count_and_sum(integers: beam.PCollection, count: int, total: int) -> None:
    """Let the run fail unless there are exactly so many integers with this sum."""

    def check(found: tuple[int, int]) -> None:
        if found != (count, total):
            raise ValueError(f"count and sum are {found}, not {(count, total)}")

    integers | "Count and sum" >> beam.CombineGlobally(CountAndSum()) | "Check" >> beam.Map(check)


def _run(build: Callable[[beam.Pipeline], Any], pipeline: beam.Pipeline) -> float:
    build(pipeline)
    start_s = time.perf_counter()
    pipeline.run().wait_until_finish()
    return time.perf_counter() - start_s


def _in_fresh_process(side: str) -> dict[str, float]:
    child = subprocess.run(
        [sys.executable, sys.argv[0], side],
        env={**os.environ, "PYTHONPATH": _module_path()},
        stdout=subprocess.PIPE,
        text=True,
        timeout=_SIDE_TIMEOUT_S,
        check=True,
    )
    # Libraries may print something at their end.
    return json.loads(next(line for line in reversed(child.stdout.splitlines()) if line.startswith("{")))


def _module_path() -> str:
    """Beam's worker processes import this module, too, and don't know where the script lies."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(__file__).resolve().parent), *([inherited] if inherited else [])])
