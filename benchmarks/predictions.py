"""A million quick predictions, one row each: two workers against Beam's runner in memory, either RunInference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import _measure
import apache_beam as beam
import numpy as np
from apache_beam.ml.inference import base
from apache_beam.ml.inference.base import ModelHandler, PredictionResult

from luminosity import RunInference

_SEEDS = 16
_ROWS = 1_000_000  # a multiple of the seeds
_WEIGHTS = (1, 2, 3, 4)


class LinearModel(ModelHandler[np.ndarray, PredictionResult, np.ndarray]):
    def load_model(self) -> np.ndarray:
        return np.array(_WEIGHTS)

    def run_inference(
        self, batch: Sequence[np.ndarray], model: np.ndarray, inference_args: dict[str, Any] | None = None
    ) -> Iterable[PredictionResult]:
        return map(PredictionResult, batch, np.stack(batch) @ model)


def rows(seed: int, count: int) -> Iterable[np.ndarray]:
    for i in range(count):
        yield np.array((seed, i, 1, 0))


def build(
    pipeline: beam.Pipeline, transform: Callable[[LinearModel], Any] = base.RunInference, total: int = _ROWS
) -> None:
    count = total // _SEEDS
    predictions = (
        pipeline
        | beam.Create(range(_SEEDS))
        | beam.Reshuffle()
        | "Rows" >> beam.FlatMap(rows, count)
        | transform(LinearModel())
        | "Value" >> beam.Map(lambda result: int(result.inference))
    )
    by_seed, by_row, constant, _ = _WEIGHTS
    expected = by_seed * sum(range(_SEEDS)) * count + by_row * sum(range(count)) * _SEEDS + constant * _SEEDS * count
    _measure.check_count_and_sum(predictions, _SEEDS * count, expected)


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    ratio = results["FnApiRunner"]["seconds"] / results["Luminosity"]["seconds"]
    _measure.print_figure("times as fast", ratio, at_least=1.6)
    ours = results["FnApiRunner"]["seconds"] / results["Luminosity, its RunInference"]["seconds"]
    _measure.print_figure("times as fast, with our RunInference", ours, at_least=1.6)


if __name__ == "__main__":
    sides: dict[str, _measure.Side] = {
        "Luminosity": lambda: {"seconds": _measure.run_ours(build, "--cpu_workers=2")},
        "Luminosity, its RunInference": lambda: {
            "seconds": _measure.run_ours(partial(build, transform=RunInference), "--cpu_workers=2")
        },
        "FnApiRunner, our RunInference": lambda: {
            "seconds": _measure.run_beams(partial(build, transform=RunInference))
        },
        "FnApiRunner": lambda: {"seconds": _measure.run_beams(build)},
    }
    _measure.main(sides, report, rounds=3)
