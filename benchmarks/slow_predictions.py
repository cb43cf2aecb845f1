"""64 slow predictions on two accelerators, against the ideal of two that never wait."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import _measure
import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler, RunInference

_PREDICTIONS = 64
_SECONDS_EACH = 0.5
_ACCELERATORS = 2


class SlowModel(ModelHandler[int, int, None]):
    def __init__(self) -> None:
        super().__init__(max_batch_size=1)

    def load_model(self) -> None:
        return None

    def run_inference(
        self, batch: Sequence[int], model: None, inference_args: dict[str, Any] | None = None
    ) -> Iterable[int]:
        for example in batch:
            time.sleep(_SECONDS_EACH)
            yield example


def build(pipeline: beam.Pipeline) -> None:
    inference = RunInference(SlowModel()).with_resource_hints(accelerator="type:nvidia-tesla-t4;count:1")
    predictions = pipeline | beam.Create(range(_PREDICTIONS)) | beam.Reshuffle() | inference
    _measure.check_count_and_sum(predictions, _PREDICTIONS, sum(range(_PREDICTIONS)))


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    ratio = results["Luminosity"]["seconds"] / results["ideal"]["seconds"]
    _measure.print_figure("of the ideal time", ratio, at_most=1.05)


if __name__ == "__main__":
    flags = ("--cpu_workers=1", f"--accelerators={_ACCELERATORS}")
    sides: dict[str, _measure.Side] = {
        "Luminosity": lambda: {"seconds": _measure.run_ours(build, *flags)},
        "ideal": lambda: {"seconds": _PREDICTIONS * _SECONDS_EACH / _ACCELERATORS},
    }
    _measure.main(sides, report)
