"""Compare what ``lum advise`` and ``lum simulate`` predict with real runs, for seven shapes of pipelines.

Each shape runs as it is, and ``lum advise`` looks at the run. Then it runs once more with the advice followed: with
the hints that are worth writing, and with the advised options. ``lum simulate`` predicts the recorded run itself, a run
with other numbers of workers, and one with twice the rows; both run for real, too.

The table has a line for each prediction: predicted and measured seconds, their ratio, predicted and measured cost.
Each run has its own process. Other work on the machine slows the runs down, above all those that compute: run it
on a quiet machine. It takes eight minutes; ``python benchmarks/advice.py waiting memory`` runs some of the shapes.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner
from luminosity.operate.advice.advise import Report, advise, hints_content
from luminosity.operate.advice.prediction import needs_with, predict
from luminosity.operate.cost.bill import bill_of, money
from luminosity.operate.cost.prices import load_prices
from luminosity.operate.simulation.forecast import forecast
from luminosity.operate.simulation.workload import PoolOrder, Scenario
from luminosity.runs.records import Record, find

_MB = 1_000_000
_T4 = "type:nvidia-tesla-t4;count:1"
_FLAGS = ("--progress=off", "--manifest=off")
_TIMEOUT_S = 300
_CLOSE = 0.15  # a prediction that differs by less is called right


def wait(seconds: float) -> Callable[[int], int]:
    """Return a function that waits for each element, as for a network."""

    def waited(element: int) -> int:
        time.sleep(seconds)
        return element

    return waited


def compute(element: int) -> int:
    """Take 20 ms of one core."""
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    return element


class InThreads(beam.DoFn):
    """Compute in two threads, which release the GIL."""

    def setup(self) -> None:
        self._threads = ThreadPoolExecutor(2)
        self._data = b"x" * (16 * _MB)

    def process(self, element: int) -> Iterator[int]:
        found = [self._threads.submit(hashlib.sha256, self._data) for _ in range(2)]
        yield element + len({each.result().digest() for each in found})

    def teardown(self) -> None:
        self._threads.shutdown()


class Hold(beam.DoFn):
    """Wait for each element, and hold memory that it fills once, as for a table."""

    def __init__(self, size: int, seconds: float) -> None:
        self._size, self._seconds = size, seconds
        self._held = b""

    def setup(self) -> None:
        self._held = b"x" * self._size

    def process(self, element: int) -> Iterator[int]:
        time.sleep(self._seconds)
        yield element + (self._held[element] == ord("x"))


def numbers(pipeline: beam.Pipeline, rows: int) -> Any:
    """Return so many numbers, for all workers."""
    return pipeline | "List" >> beam.Create(range(rows)) | "Share" >> beam.Reshuffle()


def computing(pipeline: beam.Pipeline, rows: int) -> None:
    _ = numbers(pipeline, rows) | "Compute" >> beam.Map(compute)


def threads(pipeline: beam.Pipeline, rows: int) -> None:
    _ = numbers(pipeline, rows) | "Hash" >> beam.ParDo(InThreads())


def waiting(pipeline: beam.Pipeline, rows: int) -> None:
    _ = numbers(pipeline, rows) | "Call" >> beam.Map(wait(0.05))


def memory(pipeline: beam.Pipeline, rows: int) -> None:
    light = numbers(pipeline, rows) | "Light" >> beam.Map(wait(0.01))
    _ = light | "Large" >> beam.ParDo(Hold(700 * _MB, 0.02)).with_resource_hints(min_ram="4GiB")


def too_little(pipeline: beam.Pipeline, rows: int) -> None:
    _ = numbers(pipeline, rows) | "Large" >> beam.ParDo(Hold(700 * _MB, 0.03)).with_resource_hints(min_ram="256MiB")


def bottleneck(pipeline: beam.Pipeline, rows: int) -> None:
    cheap = numbers(pipeline, rows) | "Cheap" >> beam.Map(wait(0.001))
    _ = cheap | "Again" >> beam.Reshuffle() | "Expensive" >> beam.Map(wait(0.04))


def device(pipeline: beam.Pipeline, rows: int) -> None:
    read = numbers(pipeline, rows) | "Read" >> beam.Map(wait(0.005))
    _ = read | "Infer" >> beam.ParDo(Hold(100 * _MB, 0.02)).with_resource_hints(accelerator=_T4)


@dataclass(frozen=True)
class Shape:
    """A pipeline and how it runs first."""

    build: Callable[[beam.Pipeline, int], None]
    rows: int
    flags: tuple[str, ...] = ()
    other_workers: tuple[str, ...] = ("--cpu_workers=1",)
    also: tuple[tuple[str, int], ...] = ()  # a cpu_count for each of these steps, whether or not it is advised


SHAPES = {
    "computing": Shape(computing, 500),
    "threads": Shape(threads, 300, also=(("List", 2), ("Share", 2), ("Hash", 2))),
    "waiting": Shape(waiting, 800, other_workers=("--cpu_workers=8",)),
    "memory": Shape(memory, 500),
    "too_little": Shape(too_little, 500),
    "bottleneck": Shape(bottleneck, 500, other_workers=("--cpu_workers=6",)),
    "device": Shape(device, 800, ("--accelerators=2",), ("--accelerators=1",)),
}


@dataclass(frozen=True)
class Line:
    """A prediction beside what was measured."""

    what: str
    predicted_s: float
    range_s: tuple[float, float] | None  # of the simulation
    measured_s: float
    predicted_cost: float | None
    measured_cost: float | None


def run(name: str, folder: Path, rows: int, *flags: str) -> Record:
    """Run a shape in a fresh process; return its record."""
    command = [sys.executable, __file__, f"run={name}", str(rows), f"--run_dir={folder}", *_FLAGS, *flags]
    done = subprocess.run(command, check=False, timeout=_TIMEOUT_S, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"FAILED: {name} with {flags}:\n{done.stderr[-2000:]}")
    return find(folder, "last")


def seconds_of(record: Record) -> float:
    """Return how long a run took."""
    assert record.last is not None
    return record.last.seconds


def followed(report: Report, folder: Path) -> list[str]:
    """Return the flags with which a run follows the advice."""
    flags: list[str] = []
    steps = hints_content([report])["steps"]
    if steps:
        file = folder / "hints.json"
        file.write_text(json.dumps({"steps": steps}))
        flags += ["--pools=fitted", f"--hints={file}"]
    every = [each for pool in report.pools for each in pool.advice] + list(report.workers)
    return flags + [each.write for each in every if each.gain == "saves" and each.write.startswith("--")]


def simulated(what: str, record: Record, real: Record, rows: float | None) -> Line:
    """Compare a simulation from ``record`` with a real run."""
    orders = tuple(PoolOrder(pool.name, _most(real, pool.name)) for pool in real.started.pools)
    # The same machine: all its workers share its cores.
    cores = float(real.started.machine.cores)
    found = forecast(record, Scenario(rows=rows, pools=orders, cores=cores), load_prices())
    low, middle, high = found.seconds
    cost = found.bill.total if found.bill is not None else None
    return Line(what, middle, (low, high), seconds_of(real), cost, bill_of(real, load_prices()).total)


def _most(record: Record, pool: str) -> int:
    billed = next(each for each in bill_of(record, load_prices()).pools if each.pool == pool)
    return max(1, billed.peak_workers)


def compare(name: str, shape: Shape, folder: Path) -> list[Line]:
    """Run one shape in all ways and return the lines of the table."""
    prices = load_prices()
    first = run(name, folder, shape.rows, *shape.flags)
    (report,), _ = advise([first], prices)
    print_advice(name, first, report)
    lines = [simulated("simulate the same run", first, first, None)]
    flags = followed(report, folder)
    if report.advised is not None and report.advised.total is not None and flags:
        real = run(name, folder, shape.rows, *shape.flags, *flags)
        predicted = report.advised
        cost = bill_of(real, prices).total
        lines.append(
            Line(f"advised {' '.join(flags[2:])}", predicted.seconds, None, seconds_of(real), predicted.total, cost)
        )
    if report.uniform is not None and report.uniform.total is not None and len(first.started.pools) > 1:
        real = run(name, folder, shape.rows, *shape.flags, "--pools=uniform")
        cost = bill_of(real, prices).total
        lines.append(
            Line("advise: uniform", report.uniform.seconds, None, seconds_of(real), report.uniform.total, cost)
        )
    if shape.also:
        file = folder / "also.json"
        file.write_text(json.dumps({"steps": {step: {"cpu_count": count} for step, count in shape.also}}))
        hints = {pool.use.name: {"cpu_count": shape.also[0][1]} for pool in report.pools}
        predicted = predict(report.use, needs_with(report.use, hints), prices)
        real = run(name, folder, shape.rows, *shape.flags, "--pools=fitted", f"--hints={file}")
        what = f"with cpu_count={shape.also[0][1]}"
        cost = bill_of(real, prices).total
        lines.append(Line(what, predicted.seconds, None, seconds_of(real), predicted.total, cost))
    again = run(name, folder, shape.rows, *shape.flags)
    lines.append(simulated("simulate it once more", first, again, None))
    other = run(name, folder, shape.rows, *shape.flags, *shape.other_workers)
    lines.append(simulated(f"simulate {' '.join(shape.other_workers)}", first, other, None))
    larger = run(name, folder, 2 * shape.rows, *shape.flags)
    lines.append(simulated("simulate twice the rows", first, larger, float(_rows(larger))))
    return lines


def _rows(record: Record) -> int:
    assert record.last is not None
    return max(view.elements for view in record.last.stages)


def print_advice(name: str, record: Record, report: Report) -> None:
    """Print what the advice says, in short."""
    print(f"\n{name}: took {seconds_of(record):.1f} s, {money(report.as_run.total, report.as_run.currency)}")
    for pool in report.pools:
        used = pool.use
        cpu = "?" if used.cpu_per_second is None else f"{used.cpu_per_second:.2f}"
        print(
            f"  {used.name}: {used.workers} workers, busy {used.busy_fraction:.0%}, {cpu} CPU/s, "
            f"{used.peak_ram >> 20} MiB"
        )
        for each in pool.advice:
            print(f"    {each.gain or 'look'}: {each.write}: {each.why}")
    for each in report.workers:
        print(f"    {each.gain}: {each.write}: {each.why}")


def print_table(results: dict[str, list[Line]]) -> None:
    """Print all predictions beside what was measured."""
    print(f"\n{'shape':12} {'what':44} {'predicted':>20} {'took':>7} {'ratio':>6} {'USD':>10} {'was':>10} {'ratio':>6}")
    held = total = 0
    off: list[float] = []
    for name, lines in results.items():
        for line in lines:
            ratio = line.predicted_s / line.measured_s
            said = f"{line.predicted_s:.1f} s"
            if line.range_s is not None:
                total += 1
                low, high = line.range_s
                is_held = low <= line.measured_s <= high
                held += is_held
                said += f" ({low:.1f} to {high:.1f})"
            off.append(abs(ratio - 1))
            cost = "" if line.predicted_cost is None else f"{line.predicted_cost:.6f}"
            was = "" if line.measured_cost is None else f"{line.measured_cost:.6f}"
            costs = (
                f"{line.predicted_cost / line.measured_cost:.2f}" if line.predicted_cost and line.measured_cost else ""
            )
            missed = (
                "" if line.range_s is None or line.range_s[0] <= line.measured_s <= line.range_s[1] else "  outside"
            )
            print(
                f"{name:12} {line.what[:44]:44} {said:>20} {line.measured_s:6.1f}s {ratio:6.2f} {cost:>10} {was:>10} "
                f"{costs:>6}{missed}"
            )
    close = sum(each <= _CLOSE for each in off)
    print(
        f"{close} of {len(off)} predicted times are within {_CLOSE:.0%}; median difference {statistics.median(off):.0%}"
    )
    print(f"{held} of {total} simulated ranges contain the time that was measured")


def main() -> None:
    """Measure, or run one shape if its name is given as ``run=NAME``."""
    if len(sys.argv) > 1 and sys.argv[1].startswith("run="):
        name, rows, *flags = sys.argv[1].partition("=")[2], int(sys.argv[2]), *sys.argv[3:]
        pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions(flags))
        SHAPES[name].build(pipeline, rows)
        pipeline.run().wait_until_finish()
        return
    wanted = sys.argv[1:] or list(SHAPES)
    if unknown := [each for each in wanted if each not in SHAPES]:
        raise SystemExit(f"found {unknown}, expected some of {list(SHAPES)}")
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, list[Line]] = {}
        for name in wanted:
            results[name] = compare(name, SHAPES[name], Path(folder))
        print_table(results)


if __name__ == "__main__":
    main()
