"""A model with a fixed price per call, behind batches of 16: how many calls are made, against the ideal number."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import _measure
import apache_beam as beam
from apache_beam.ml.inference import base

from luminosity import RunInference

_BATCH = 16
_HINT = "type:nvidia-tesla-t4;count:1"
_CALLS = os.environ.setdefault("FIXED_PRICE_CALLS", os.path.join(tempfile.gettempdir(), f"calls.{os.getpid()}"))


def call(batch: Sequence[int], seconds: float) -> None:
    """One call of the model. Counted in a file, since it may happen in any process."""
    with open(_CALLS, "ab", buffering=0) as calls:
        calls.write(bytes([len(batch)]))
    time.sleep(seconds)


class CallPerBatch(beam.DoFn):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def process(self, element: list[int]) -> Iterator[int]:
        call(element, self._seconds)
        yield from element


class Loaded:
    """What is loaded: nothing, but Beam keeps weak references to it."""


class Model(base.ModelHandler[int, int, Loaded]):
    def __init__(self, seconds: float) -> None:
        super().__init__(min_batch_size=_BATCH, max_batch_size=_BATCH)
        self._seconds = seconds

    def load_model(self) -> Loaded:
        return Loaded()

    def run_inference(
        self, batch: Sequence[int], model: Loaded, inference_args: dict[str, Any] | None = None
    ) -> Iterable[int]:
        call(batch, self._seconds)
        return list(batch)


def build(pipeline: beam.Pipeline, kind: str, rows: int, seconds: float, has_hint: bool) -> None:
    if kind == "DoFn":
        step = beam.BatchElements(_BATCH, _BATCH) | beam.ParDo(CallPerBatch(seconds))
    else:
        step = (RunInference if kind == "ours" else base.RunInference)(Model(seconds))
    if has_hint:
        step = step.with_resource_hints(accelerator=_HINT)
    results: Any = pipeline | beam.Create(range(rows)) | step
    _measure.check_count_and_sum(results, rows, sum(range(rows)))


def measure(runner: str, kind: str, rows: int, seconds: float, has_hint: bool) -> dict[str, float]:
    def built(pipeline: beam.Pipeline) -> None:
        build(pipeline, kind, rows, seconds, has_hint)

    try:
        if runner == "FnApiRunner":
            taken = _measure.run_beams(built)
        else:
            flags = ["--accelerators=1"] if has_hint else []
            taken = _measure.run_ours(built, f"--cpu_workers={runner.split()[0]}", *flags)
        with open(_CALLS, "rb") as calls:
            sizes = calls.read()
    finally:
        if os.path.exists(_CALLS):
            os.unlink(_CALLS)
    return {"rows": rows, "price": seconds, "calls": len(sizes), "ideal": math.ceil(rows / _BATCH), "seconds": taken}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    for workers, most in ((1, 5), (2, 6)):
        calls = [r["calls"] for name, r in results.items() if f"{workers} worker" in name and r["rows"] == 64]
        _measure.print_figure(f"most calls for 64 rows (ideal 4), workers: {workers}", max(calls), at_most=most)
    ratios = [r["calls"] / r["ideal"] for name, r in results.items() if "worker" in name and r["rows"] == 320]
    _measure.print_figure("most calls for 320 rows, of the ideal 20", max(ratios), at_most=1.1)


if __name__ == "__main__":
    kinds = itertools.product(("DoFn", "Beam's", "ours"), (False, True), ((64, 0.6), (64, 1.2), (320, 0.6)))
    sides: dict[str, _measure.Side] = {}
    for kind, has_hint, (rows, seconds) in kinds:
        for runner in ("FnApiRunner", "1 worker", "2 workers"):
            if runner != "FnApiRunner" or (rows == 64 and not has_hint):
                case = runner, kind, rows, seconds, has_hint
                name = f"{kind}{', hint' if has_hint else ''}, {rows} rows, {seconds} s, {runner}"
                sides[name] = lambda case=case: measure(*case)
    _measure.main(sides, report)
