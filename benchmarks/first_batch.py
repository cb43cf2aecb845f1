"""256 texts into vectors, one worker a core: how long after `run()` the first batch of vectors comes.

The model runs on an accelerator if there is one. Otherwise its worker computes on the CPU, but starts like that of an
accelerator. `python benchmarks/first_batch.py --rounds=N` repeats both sides N times.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import _measure
import apache_beam as beam
from _texts import MODEL
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner, RunInference, SentenceEmbedder, WorkerShare, WorkerStarted
from luminosity.core import InferenceMetrics

_ROWS = 256
_SHARDS = 16  # each is an element that a worker can take
_BEFORE_RUN_S = 2.0  # the fork server starts with the runner, as it does while a real pipeline is built
_MARKS = ("workers prepare", "first prepared", "model loaded", "first batch", "first result")


class Marks:
    """Times of the first events of each process, as files: processes can't share anything simpler."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def mark(self, name: str) -> None:
        path = Path(self._folder, f"{name}.{os.getpid()}")
        if not path.exists():
            path.write_text(repr(time.time()))

    def all(self, name: str) -> list[float]:
        return sorted(float(path.read_text()) for path in Path(self._folder).glob(f"{name}.*"))


class MarkedEmbedder(SentenceEmbedder):
    """The embedder, with the times at which its parts begin and end.

    It replaces no method that loads or calls the model: an embedder that does so runs with transformers.
    """

    def __init__(self, marks: Marks, with_transformers: bool) -> None:
        super().__init__(str(MODEL))
        self.reads_tokenizer_json = self.packs_rows = not with_transformers
        self._marks = marks

    def prepare(self, block: Any) -> Any:
        is_worker = not WorkerShare.current().devices  # the device's worker prepares a text to warm up
        if is_worker:
            self._marks.mark("workers prepare")
        prepared = super().prepare(block)
        if is_worker:
            self._marks.mark("first prepared")
        return prepared

    @cached_property
    def packing(self) -> Any:
        if WorkerShare.current().devices:  # the first that a load asks for
            self._marks.mark("load begins")
        return super().packing

    def warm_up(self, model: Any) -> None:
        self._marks.mark("model loaded")
        super().warm_up(model)

    def collect(self, outputs: Any) -> Any:
        collected = super().collect(outputs)
        if len(collected) > 1:  # not the text to warm up
            self._marks.mark("first batch")
        return collected


def side(with_transformers: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        marks = Marks(folder)
        started: list[float] = []

        def on_event(event: Any) -> None:
            if isinstance(event, WorkerStarted):
                started.append(time.time())

        runner = LuminosityRunner(on_event=on_event)
        time.sleep(_BEFORE_RUN_S)
        options = PipelineOptions(["--progress=off", *_accelerators()])
        pipeline = beam.Pipeline(runner, options)
        embed = RunInference(MarkedEmbedder(marks, with_transformers))

        def texts(shard: int) -> list[str]:
            return [f"text number {row} of shard {shard}, of some words" for row in range(_ROWS // _SHARDS)]

        def dimension(result: Any) -> int:
            marks.mark("first result")
            return len(result.inference)

        vectors: Any = (
            pipeline
            | beam.Create(range(_SHARDS))
            | beam.Reshuffle()
            | "Texts" >> beam.FlatMap(texts)
            | "Embed" >> embed.with_resource_hints(accelerator="type:any;count:1")
            | "Dimension" >> beam.Map(dimension)
        )
        _measure.check_count_and_sum(vectors, _ROWS, _ROWS * 384)
        began = time.time()
        result = pipeline.run()
        result.wait_until_finish()
        ended = time.time()
        packed = _packed_rows(result.metrics())
        if with_transformers == (packed > 0):
            raise ValueError(f"found {packed} rows without padding, expected {0 if with_transformers else _ROWS}")
        found = {f"{name} (s)": marks.all(name)[0] - began for name in ("load begins", *_MARKS)}
        return {
            "first worker connects (s)": started[0] - began,
            **found,
            "end (s)": ended - began,
            "workers started": len(started),
            "workers that prepared": len(marks.all("workers prepare")),
        }


def _packed_rows(metrics: Any) -> int:
    found = (each for each in metrics.query()["counters"] if each.key.metric.name == InferenceMetrics.PACKED)
    return sum(each.committed for each in found)


def _accelerators() -> list[str]:
    import subprocess

    try:
        found = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        return ["--accelerators=1"]
    return [] if found.stdout.strip() else ["--accelerators=1"]


def report(results: _measure.Results) -> None:
    columns = list(next(iter(results.values())))
    width = max(map(len, columns))
    print(" " * width, *(f"{name:>22}" for name in results))
    for column in columns:
        print(f"{column:{width}}", *(f"{values[column]:22.2f}" for values in results.values()))
    seconds = results["without transformers"]["first batch (s)"]
    _measure.print_figure("seconds from run() to the first batch", seconds, at_most=8)


if __name__ == "__main__":
    rounds = next((int(each[9:]) for each in sys.argv if each.startswith("--rounds=")), 1)
    sys.argv = [each for each in sys.argv if not each.startswith("--rounds=")]
    sides: dict[str, _measure.Side] = {
        "without transformers": lambda: side(False),
        "with transformers": lambda: side(True),
    }
    _measure.main(sides, report, rounds)
