"""Measures how soon elements of a stream see a change of their side input, and how long a new model holds them up.

The first part updates a side input in the global window every few seconds. Each element notes how old the value is that
it reads: at best it is one interval old just before the next update. The second part runs a model over the same stream,
with RunInference of Beam and of Luminosity. Half-way the side input ``model_metadata_pcoll`` names another model. You
see the longest time without a result, and whether each element has had one result.

    python benchmarks/changing_side_input.py
    python benchmarks/changing_side_input.py --interval 2 --seconds 20

The exit code is 1 if a value was older than 1.2 intervals, a pause was longer than a second, or an element was lost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler, ModelMetadata, PredictionResult
from apache_beam.ml.inference.base import RunInference as BeamRunInference
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsSingleton
from apache_beam.transforms import trigger
from apache_beam.transforms.periodicsequence import PeriodicImpulse
from apache_beam.transforms.window import FixedWindows, GlobalWindows

from luminosity import LuminosityRunner, RunInference

ELEMENT_EVERY_S = 0.01
LOAD_S = 0.5  # how long the new model takes to load
START_S = 5.0  # for workers to start; nothing is judged before
MOST_INTERVALS = 1.2
MOST_PAUSE_S = 1.0


class Model:
    """Adds one."""

    def __call__(self, example: int) -> int:
        return example + 1


class Adder(ModelHandler[int, PredictionResult, Model]):
    """A model that names itself in its results, and takes a while to load."""

    def __init__(self, path: str) -> None:
        self._path = path

    def load_model(self) -> Model:
        if self._path != "first":
            time.sleep(LOAD_S)
        return Model()

    def update_model_path(self, model_path: str | None = None) -> None:
        self._path = model_path or self._path

    def run_inference(
        self, batch: Sequence[int], model: Model, inference_args: dict[str, Any] | None = None
    ) -> Iterable[PredictionResult]:
        return [PredictionResult(example, model(example), model_id=self._path) for example in batch]


def main() -> None:
    """Run both parts, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="between two updates")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="how long each stream runs")
    options = parser.parse_args()
    is_fine = updates(options.interval, options.seconds)
    for name, transform in (("Beam's RunInference", BeamRunInference), ("luminosity.RunInference", RunInference)):
        is_fine &= new_model(name, transform, options.seconds)
    sys.exit(not is_fine)


def latest_element() -> beam.WindowInto:
    """Return a window whose latest element is what a side input shows."""
    return beam.WindowInto(
        GlobalWindows(),
        trigger=trigger.Repeatedly(trigger.AfterCount(1)),
        accumulation_mode=trigger.AccumulationMode.DISCARDING,
    )


def updates(interval: float, seconds: float) -> bool:
    """Update a side input every ``interval`` seconds, and print how old the values are that elements read."""
    start = time.time()
    end = start + seconds

    def build(pipeline: beam.Pipeline, path: str) -> None:
        values = (
            pipeline
            | "Ticks" >> PeriodicImpulse(start, end, interval)
            | "Now" >> beam.Map(lambda _: time.time())
            | "Updates" >> latest_element()
        )
        _ = (
            pipeline
            | "Elements" >> PeriodicImpulse(start, end, ELEMENT_EVERY_S)
            | beam.WindowInto(FixedWindows(1))
            | beam.Map(lambda _, value: note(path, [time.time(), value]), AsSingleton(values))
        )

    read = [(at, value) for at, value in run(build) if at > start + START_S and at < end]
    first_seen = {value: min(at for at, seen in read if seen == value) for value in {value for _, value in read}}
    delays = sorted(at - value for value, at in first_seen.items())[:-1]  # the first one judged may have come before
    oldest = max(at - value for at, value in read) / interval
    print(f"side input every {interval:g} s: {len(read)} elements read {len(first_seen)} versions")
    print(f"  an update is seen after {1000 * max(delays):.0f} ms at most")
    print(f"  the oldest value that an element read: {oldest:.2f} intervals (at most {MOST_INTERVALS})")
    return oldest <= MOST_INTERVALS


def new_model(name: str, transform: Any, seconds: float) -> bool:
    """Run a model over a stream, replace it half-way by a side input, and print the longest pause."""
    start = time.time()
    end, middle = start + seconds, start + START_S + (seconds - START_S) / 2

    def build(pipeline: beam.Pipeline, path: str) -> None:
        models = (
            pipeline
            | "Ticks" >> PeriodicImpulse(start, end, 0.5)
            | "Model" >> beam.Map(lambda _: ModelMetadata("second" if time.time() > middle else "first", "model"))
            | "Updates" >> latest_element()
        )
        _ = (
            pipeline
            | "Elements" >> PeriodicImpulse(start, end, ELEMENT_EVERY_S)
            | beam.Map(lambda tick: round((float(tick) - start) / ELEMENT_EVERY_S))
            | beam.WindowInto(FixedWindows(1))
            | transform(Adder("first"), model_metadata_pcoll=models)
            | beam.Map(lambda result: note(path, [time.time(), result.example, result.model_id]))
        )

    results = sorted(run(build))
    numbers = [number for _, number, _ in results]
    lost = set(range(max(numbers) + 1)) - set(numbers)
    times = [at for at, _, _ in results if start + START_S < at < end]
    pause = max(after - before for before, after in itertools.pairwise(times))
    by_second = sum(model == "second" for _, _, model in results)
    repeated = len(numbers) - len(set(numbers))
    print(f"{name}: {len(results)} results, {by_second} of the second model; {len(lost)} lost, {repeated} repeated")
    print(f"  longest time without a result: {1000 * pause:.0f} ms (at most {1000 * MOST_PAUSE_S:.0f})")
    return pause <= MOST_PAUSE_S and not lost and not repeated and bool(by_second)


def run(build: Any) -> list[Any]:
    """Run a pipeline to its end, and return what its last step noted."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "notes")
        pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", "--streaming"]))
        build(pipeline, path)
        pipeline.run().wait_until_finish()
        return [json.loads(line) for line in Path(path).read_text().splitlines()]


def note(path: str, value: list[Any]) -> None:
    """Append a line, which several workers may do at a time."""
    with open(path, "a") as file:
        file.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    main()
