"""A model that takes 20 ms a batch behind a `prepare` that takes 20 ms a block, against the longer one alone."""

from __future__ import annotations

import time
from typing import Any

import _measure
import apache_beam as beam

from luminosity import Handler, RunInference

_STEPS = 500
_EXAMPLES = 64
_SECONDS = 0.02


class TwoHalves(Handler[int, int, object]):
    """Both halves take their time for a block of 64 examples, and the same share of it for less."""

    def __init__(self, prepares: bool, predicts: bool) -> None:
        super().__init__(max_batch_size=_EXAMPLES, min_batch_size=_EXAMPLES)
        self._prepare_s = _SECONDS / _EXAMPLES if prepares else 0.0
        self._predict_s = _SECONDS / _EXAMPLES if predicts else 0.0

    def load_model(self) -> object:
        return object()

    def prepare(self, block: Any) -> Any:
        time.sleep(self._prepare_s * len(block))
        return block

    def predict(self, model: object, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        time.sleep(self._predict_s * len(batch))
        return batch


def seconds(run: Any, prepares: bool, predicts: bool) -> dict[str, float]:
    def build(pipeline: beam.Pipeline) -> None:
        results = pipeline | beam.Create(range(_STEPS * _EXAMPLES)) | RunInference(TwoHalves(prepares, predicts))
        total = _STEPS * _EXAMPLES
        _measure.check_count_and_sum(results | beam.Map(lambda result: result.inference), total, sum(range(total)))

    return {"seconds": run(build)}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    for runner in ("FnApiRunner", "Luminosity"):
        longer = max(results[f"prepare alone, {runner}"]["seconds"], results[f"predict alone, {runner}"]["seconds"])
        ratio = results[f"both, {runner}"]["seconds"] / longer
        _measure.print_figure(f"of the longer one alone, {runner}", ratio, at_most=1.05)


if __name__ == "__main__":
    runners = {
        "FnApiRunner": _measure.run_beams,
        "Luminosity": lambda build: _measure.run_ours(build, "--cpu_workers=1"),
    }
    kinds = {"both": (True, True), "prepare alone": (True, False), "predict alone": (False, True)}
    sides: dict[str, _measure.Side] = {
        f"{kind}, {name}": lambda run=run, halves=halves: seconds(run, *halves)
        for name, run in runners.items()
        for kind, halves in kinds.items()
    }
    _measure.main(sides, report)
