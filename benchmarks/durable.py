"""Three batch pipelines, in turns without and with ``--checkpoint_dir``: what checkpoints cost."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import _measure
import apache_beam as beam
import numpy as np
from apache_beam.ml.inference.base import ModelHandler

from luminosity import RunInference

_PAIRS = int(os.environ.get("PAIRS", "5"))
_AT_MOST = 1.10  # of the time without checkpoints


class _Double(ModelHandler[int, int, float]):
    """A model that takes a millisecond for a batch."""

    def load_model(self) -> float:
        return 2.0

    def run_inference(
        self, batch: Sequence[int], model: float, inference_args: dict[str, Any] | None = None
    ) -> list[int]:
        time.sleep(0.001)
        return (np.asarray(batch) * model).astype(int).tolist()


def _predictions(pipeline: beam.Pipeline) -> Any:
    return pipeline | beam.Create(range(1_000_000)) | RunInference(_Double())


def _grouping(pipeline: beam.Pipeline) -> Any:
    pairs = pipeline | beam.Create(range(100)) | beam.Reshuffle() | beam.FlatMap(_pairs)
    return pairs | beam.GroupByKey() | beam.MapTuple(lambda key, values: (key, sum(map(len, values))))


def _pairs(part: int) -> Iterator[tuple[int, str]]:
    return ((number % 1000, "x" * 100) for number in range(part * 20_000, (part + 1) * 20_000))


def _reshuffle(pipeline: beam.Pipeline) -> Any:
    rows = pipeline | beam.Create(range(100)) | "Spread" >> beam.Reshuffle() | beam.FlatMap(_rows)
    return rows | beam.Reshuffle() | beam.Map(len) | beam.CombineGlobally(sum)


def _rows(part: int) -> Iterator[bytes]:
    return (bytes(200) for _ in range(20_000))


_PIPELINES: dict[str, Callable[[beam.Pipeline], Any]] = {
    "predictions": _predictions,
    "grouping": _grouping,
    "reshuffle": _reshuffle,
}


def _side(name: str, *, is_durable: bool) -> dict[str, float]:
    """Run a pipeline twice, and measure the second run."""
    figures: dict[str, float] = {}
    for _ in range(2):
        with tempfile.TemporaryDirectory(dir=os.environ.get("CHECKPOINTS")) as folder:
            cpu = _cpu_seconds()
            flags = [f"--checkpoint_dir={folder}/checkpoint"] if is_durable else []
            figures = {"seconds": _measure.run_ours(_PIPELINES[name], *flags)}
            figures["cpu"] = _cpu_seconds() - cpu
    return figures


def _cpu_seconds() -> float:
    """Return the CPU time of this process, where the loop runs, and of the workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _report(results: _measure.Results) -> None:
    _measure.print_table(results)
    for name in _PIPELINES:
        without, durable = results[name], results[f"{name}, durable"]
        _measure.print_figure(f"{name}: of the time without", durable["seconds"] / without["seconds"], at_most=_AT_MOST)
        _measure.print_figure(f"{name}: of the CPU time without", durable["cpu"] / without["cpu"])


if __name__ == "__main__":
    _SIDES: dict[str, _measure.Side] = {}
    for _name in _PIPELINES:
        _SIDES[_name] = partial(_side, _name, is_durable=False)
        _SIDES[f"{_name}, durable"] = partial(_side, _name, is_durable=True)
    _measure.main(_SIDES, _report, rounds=_PAIRS)
