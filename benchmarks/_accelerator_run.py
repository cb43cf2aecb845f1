"""One run of a pipeline with models on an accelerator: when results came, and what its steps counted."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import apache_beam as beam
from _accelerator_models import has_cuda, is_small
from _measure import CountAndSum
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner, RunInference
from luminosity.core import InferenceMetrics, computed_by

__all__ = ["Run", "run"]

_EVERY = 4 if is_small() else 256  # results


class _Progress:
    """How many results there were when, as files of each process: processes can't share anything simpler."""

    _counts: ClassVar[Counter[tuple[str, str]]] = Counter()
    """Of this process, by folder and name."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def add(self, name: str) -> None:
        """Count one more, and write down the first and each of some hundred."""
        self._counts[self._folder, name] += 1
        count = self._counts[self._folder, name]
        if count == 1 or count % _EVERY == 0:
            with Path(self._folder, f"{name}.{os.getpid()}").open("a") as file:
                file.write(f"{time.time()!r} {count}\n")

    def read(self, name: str) -> list[list[tuple[float, int]]]:
        """Return the times and counts of each process."""
        parts = ([line.split() for line in path.read_text().splitlines()] for path in self._paths(name))
        return [[(float(at), int(count)) for at, count in part] for part in parts]

    def _paths(self, name: str) -> Iterator[Path]:
        return Path(self._folder).glob(f"{name}.*")


@dataclass(frozen=True)
class Run:
    """How long a run took."""

    rows: int
    firsts: Mapping[str, float]
    """Seconds from ``run()`` to the first result, by model."""
    done_s: float
    """From ``run()`` until all results have been counted."""
    whole_s: float
    """From ``run()`` to its end."""
    counters: Mapping[str, Mapping[str, int]]
    """By step."""
    points: Mapping[str, list[list[tuple[float, int]]]]
    """For each model and process, how many results there were how many seconds after ``run()``."""

    @property
    def first_s(self) -> float:
        """From ``run()`` to the first result."""
        return min(self.firsts.values())

    def left_at(self, name: str, seconds: float) -> int:
        """Return how many results of a model were still to come at this time."""
        done = (max((count for at, count in part if at <= seconds), default=0) for part in self.points[name])
        return self.rows - sum(done)

    @property
    def rate(self) -> float:
        """Rows per second after the first result."""
        return self.rows / (self.done_s - self.first_s)

    @property
    def whole_rate(self) -> float:
        """Rows per second of the whole run."""
        return self.rows / self.whole_s

    def counter(self, name: str) -> int:
        """Return a counter, summed over steps."""
        return sum(found.get(name, 0) for found in self.counters.values())

    @property
    def said(self) -> str:
        """How models ran, in words."""
        ways = dict.fromkeys(computed_by(found) for found in self.counters.values())
        batches, padded = self.counter(InferenceMetrics.BATCHES), self.counter(InferenceMetrics.PADDED_COST)
        busy = self.counter(InferenceMetrics.DEVICE_BUSY) / 1e6
        work = f"{batches:,} batches of {padded / max(1, batches):,.0f}, device busy {busy:.1f} s"
        return "; ".join([*filter(None, ways), work])


def run(handlers: Mapping[str, Any], make: Callable[[int, int], list[Any]], rows: int, per_shard: int) -> Run:
    """Run all handlers on the rows of ``make``, a function of a number of rows and a seed."""
    shards = max(1, rows // per_shard)
    rows = shards * per_shard
    flags = [] if has_cuda() else ["--accelerators=1"]
    built = beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", *flags]))
    with tempfile.TemporaryDirectory() as folder:
        progress = _Progress(folder)

        def one(result: Any, name: str) -> int:
            progress.add(name)
            return 1 if result.inference is not None else 0

        def check(found: tuple[int, int]) -> None:
            progress.add("done")
            if found != (rows * len(handlers), rows * len(handlers)):
                raise ValueError(f"{found} results, of {rows * len(handlers)}")

        examples = (
            built
            | beam.Create(range(shards))
            | beam.Reshuffle()
            | "Examples" >> beam.FlatMap(lambda seed: make(per_shard, seed))
        )
        ones = [
            examples
            | name >> RunInference(handler).with_resource_hints(accelerator="type:any;count:1")
            | f"One of {name}" >> beam.Map(one, name)
            for name, handler in handlers.items()
        ]
        _ = ones | beam.Flatten() | beam.CombineGlobally(CountAndSum()) | beam.Map(check)
        begun = time.time()
        result = built.run()
        result.wait_until_finish()
        whole_s = time.time() - begun
        counters: dict[str, dict[str, int]] = {}
        for each in result.metrics().query()["counters"]:
            counters.setdefault(each.key.step, {})[each.key.metric.name] = each.committed
        points = {
            name: [[(at - begun, count) for at, count in part] for part in progress.read(name)]
            for name in (*handlers, "done")
        }
    firsts = {name: min(part[0][0] for part in parts) for name, parts in points.items()}
    return Run(rows, firsts, firsts.pop("done"), whole_s, counters, points)
