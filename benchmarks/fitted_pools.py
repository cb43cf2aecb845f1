"""The shape of a talk's pipeline, run with uniform and with fitted workers: what the second way saves of the bill.

I/O, preprocessing with much RAM, an accelerator, I/O: each step takes the same time for an element. RAM is that of the
talk (4, 32 and 8 GB) divided by 16, and really used. The accelerator is a declared T4, and its step sleeps.

Uniform workers get the most of each resource that any step asks for; fitted workers follow the hints that
`lum advise --write` wrote after a first run. Both run in turns, each in a fresh process. Bills are those of the
recorded runs, for the lifetimes of workers. Last comes a pipeline from whose bill nothing is to be saved.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner
from luminosity.operate.advice.advise import advise, hints_content
from luminosity.operate.cost.bill import bill_of, money
from luminosity.operate.cost.prices import load_prices
from luminosity.runs.records import find

_PAIRS = 5
_T_OF_5 = 2.776  # the quantile of Student's distribution for an interval of 95% from five pairs
_TARGET = 0.4
_ELEMENTS = 200
_SECONDS = 0.04  # for an element, in each step
_MB = 1_000_000
_TABLE_BYTES, _MODEL_BYTES = 1_600 * _MB, 300 * _MB
_IO = {"min_ram": "256MB"}
_LARGE = {"min_ram": "2GB"}
_DEVICE = {"min_ram": "512MB", "accelerator": "type:nvidia-tesla-t4;count:1"}
_FLAGS = ("--progress=off", "--manifest=off", "--accelerators=1", "--missing_resources=fail")
_TIMEOUT_S = 900


def wait(element: int) -> int:
    """Read or write an element somewhere else: takes time, but no CPU."""
    time.sleep(_SECONDS)
    return element


class Hold(beam.DoFn):
    """Needs RAM that it fills once, as for a table or a model."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held = b""

    def setup(self) -> None:
        self._held = b"x" * self._size

    def process(self, element: int) -> Iterator[int]:
        time.sleep(_SECONDS)
        yield element * 2 + (self._held[element] == ord("x"))


def talk(pipeline: beam.Pipeline, output: str) -> None:
    """Build the pipeline of the talk."""
    elements = pipeline | "List" >> beam.Create(range(_ELEMENTS)).with_resource_hints(**_IO)
    _ = (
        elements
        | "Share" >> beam.Reshuffle().with_resource_hints(**_IO)
        | "Read" >> beam.Map(wait).with_resource_hints(**_IO)
        | "Prepare" >> beam.ParDo(Hold(_TABLE_BYTES)).with_resource_hints(**_LARGE)
        | "Infer" >> beam.ParDo(Hold(_MODEL_BYTES)).with_resource_hints(**_DEVICE)
        | "Write" >> beam.Map(wait).with_resource_hints(**_IO)
        | "Lines" >> beam.Map(str).with_resource_hints(**_IO)
        | "Save" >> beam.io.WriteToText(output).with_resource_hints(**_IO)
    )


def square(element: int) -> int:
    """Compute for a while."""
    return sum(i * i for i in range(20_000)) * 0 + element * element


def tight(pipeline: beam.Pipeline, output: str) -> None:
    """Build a pipeline of one kind of step, which asks for what it needs and keeps all cores busy."""
    hints = {"min_ram": "256MiB"}
    elements = pipeline | "List" >> beam.Create(range(4000)).with_resource_hints(**hints)
    _ = (
        elements
        | "Share" >> beam.Reshuffle().with_resource_hints(**hints)
        | "Square" >> beam.Map(square).with_resource_hints(**hints)
        | "Lines" >> beam.Map(str).with_resource_hints(**hints)
        | "Save" >> beam.io.WriteToText(output).with_resource_hints(**hints)
    )


_PIPELINES: dict[str, Callable[[beam.Pipeline, str], None]] = {"talk": talk, "tight": tight}


def run(name: str, folder: Path, *flags: str) -> Any:
    """Run a pipeline in a fresh process; return its record. Its output must be that of the runs before."""
    output = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, __file__, name, str(output / "part"), f"--run_dir={folder / 'runs'}", *_FLAGS, *flags]
    subprocess.run(command, check=True, timeout=_TIMEOUT_S, stderr=subprocess.DEVNULL)
    lines = sorted(line for part in output.glob("part*") for line in part.read_text().splitlines())
    expected = folder / f"{name}.json"
    if not expected.exists():
        expected.write_text(json.dumps(lines))
    if not lines or lines != json.loads(expected.read_text()):
        raise SystemExit(f"FAILED: the output of {name} with {flags} differs")
    return find(folder / "runs", "last")


def measure(folder: Path) -> None:
    """Run everything and print the figures."""
    prices = load_prices()
    first = run("talk", folder, "--pools=hints")
    (report,), _ = advise([first], prices)
    hints = folder / "hints.json"
    hints.write_text(json.dumps(hints_content([report])))
    print(f"hints of the advice: {json.dumps(hints_content([report])['steps'])}")
    if report.advised is not None and report.uniform is not None:
        told = [("as run", report.as_run), ("uniform", report.uniform), ("advised", report.advised)]
        print(
            "after the first run: "
            + ", ".join(f"{n} {money(b.total, b.currency)} in {b.seconds:.0f} s" for n, b in told)
        )
    ways = {"uniform": ("--pools=uniform",), "fitted": ("--pools=fitted", f"--hints={hints}")}
    savings: list[float] = []
    totals: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(1, _PAIRS + 1):
        bills = {way: bill_of(run("talk", folder, *flags), prices) for way, flags in ways.items()}
        for way, bill in bills.items():
            totals[way].append(bill.total or math.nan)
        savings.append(1 - totals["fitted"][-1] / totals["uniform"][-1])
        told = ", ".join(f"{way} {money(b.total, b.currency)} in {b.seconds:.1f} s" for way, b in bills.items())
        print(f"pair {number}: {told}, saved {savings[-1]:.1%}", flush=True)
    half = _T_OF_5 * stdev(savings) / math.sqrt(_PAIRS)
    print(f"medians: uniform {median(totals['uniform']):.6f} USD, fitted {median(totals['fitted']):.6f} USD")
    is_met = "met" if mean(savings) >= _TARGET else "MISSED"
    print(f"saved: {mean(savings):.1%} ± {half:.1%} (95% interval; target: at least {_TARGET:.0%}; {is_met})")
    (report,), _ = advise([run("tight", folder, "--pools=hints")], prices)
    verdict = "saves something" if report.is_worth_it else "says that nothing is to be saved"
    print(f"a pipeline that fits already: the advice changes its bill by {report.saving:.1%} and {verdict}")


def main() -> None:
    """Measure, or run one side if its name is given."""
    if len(sys.argv) > 1:
        name, output, *flags = sys.argv[1:]
        pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions(flags))
        _PIPELINES[name](pipeline, output)
        pipeline.run().wait_until_finish()
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder))


if __name__ == "__main__":
    main()
