"""64 slow predictions on four accelerators of two nodes of a Ray cluster: ours, Ray Data's, and the ideal.

The accelerators are declared, and a prediction sleeps. Each prediction notes when it begins and ends: the time after
the start is that from the first beginning to the last end. The whole time is that of the pipeline, with the start of
all workers. Ray Data gets what its guide advises: a class, one actor per accelerator, batches of one row, as many
blocks as rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import _measure
import _ray_cluster
import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.ml.inference.base import ModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

_PREDICTIONS = 64
_SECONDS_EACH = 0.5
_ACCELERATORS = 4
_NODES = [_ray_cluster.FakeNode(cpus=2, gpus=2), _ray_cluster.FakeNode(cpus=2, gpus=2)]


class SlowModel(ModelHandler[int, int, None]):
    def __init__(self) -> None:
        super().__init__(max_batch_size=1)

    def load_model(self) -> None:
        return None

    def run_inference(
        self, batch: Sequence[int], model: None, inference_args: dict[str, Any] | None = None
    ) -> Iterable[int]:
        times = Metrics.distribution("slow_predictions", "times_ms")
        for example in batch:
            times.update(int(1000 * time.time()))
            time.sleep(_SECONDS_EACH)
            times.update(int(1000 * time.time()))
            yield example


def ours() -> dict[str, float]:
    from luminosity import LuminosityRunner

    options = PipelineOptions(["--progress=off", f"--ray_address={_ray_cluster.address()}", "--cpu_workers=1"])
    pipeline = beam.Pipeline(LuminosityRunner(), options)
    inference = RunInference(SlowModel()).with_resource_hints(accelerator="type:nvidia-tesla-t4;count:1")
    predictions = pipeline | beam.Create(range(_PREDICTIONS)) | beam.Reshuffle() | inference
    _measure.check_count_and_sum(predictions, _PREDICTIONS, sum(range(_PREDICTIONS)))
    with _ray_cluster.CpuMeter() as meter:
        begun = time.perf_counter()
        result = pipeline.run()
        result.wait_until_finish()
        seconds = time.perf_counter() - begun
    (times,) = (
        found.committed for found in result.metrics().query()["distributions"] if found.key.metric.name == "times_ms"
    )
    assert times.count == 2 * _PREDICTIONS
    return {"after start, s": (times.max - times.min) / 1000, "whole run, s": seconds, "CPU, s": meter.seconds}


class SlowActor:
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        begun = time.time()
        time.sleep(_SECONDS_EACH)
        rows = len(batch["id"])
        return {**batch, "begun": [begun] * rows, "ended": [time.time()] * rows}


def ray_data() -> dict[str, float]:
    data = _ray_cluster.connect_ray_data()
    actors = data.ActorPoolStrategy(size=_ACCELERATORS)
    with _ray_cluster.CpuMeter() as meter:
        begun = time.perf_counter()
        rows = (
            data.range(_PREDICTIONS, override_num_blocks=_PREDICTIONS)
            .map_batches(SlowActor, batch_size=1, num_gpus=1, num_cpus=0, compute=actors)
            .take_all()
        )
        seconds = time.perf_counter() - begun
    assert sorted(row["id"] for row in rows) == list(range(_PREDICTIONS))
    after_start = max(row["ended"] for row in rows) - min(row["begun"] for row in rows)
    return {"after start, s": after_start, "whole run, s": seconds, "CPU, s": meter.seconds}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    ideal = results["ideal"]["after start, s"]
    ours, theirs = results["Luminosity"], results["Ray Data"]
    _measure.print_figure("of the ideal time, after start", ours["after start, s"] / ideal, at_most=1.15)
    _measure.print_figure("of the ideal time, after start, Ray Data", theirs["after start, s"] / ideal)
    for name in ("after start, s", "whole run, s"):
        _measure.print_figure(f"of Ray Data's time, {name.removesuffix(', s')}", ours[name] / theirs[name], at_most=1.0)


if __name__ == "__main__":
    sides: dict[str, _measure.Side] = {
        "Luminosity": ours,
        "Ray Data": ray_data,
        "ideal": lambda: {
            "after start, s": _PREDICTIONS * _SECONDS_EACH / _ACCELERATORS,
            "whole run, s": _PREDICTIONS * _SECONDS_EACH / _ACCELERATORS,
        },
    }
    _ray_cluster.main(sides, report, _NODES)
