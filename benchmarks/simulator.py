"""Compare ``lum simulate`` with reality: fit it to a run with one worker, predict two workers, and run with two.

Four cases: a step that sleeps, a step that computes, two pools with RunInference, and a worker that is killed. Each
prints the prediction, the reality and their ratio, and what the simulation of the measured run itself takes. Other work
on the machine slows the real runs down, above all the computing case: run it on a quiet machine. It takes about four
minutes; ``python benchmarks/simulator.py sleeping computing`` runs some of the cases.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner, RunInference
from luminosity.events import Event, WorkerStarted
from luminosity.operate.cost.prices import load_prices
from luminosity.operate.simulation.forecast import forecast
from luminosity.operate.simulation.workload import PoolOrder, Scenario
from luminosity.runs import records
from luminosity.runs.records import Record

_ELEMENTS = 2000
_ELEMENT_S = 0.01
_MODEL_FIXED_S = 0.02  # of a batch
_MODEL_EACH_S = 0.008  # of an example
_KILL_AT_S = 5.0
_TARGET = 0.1  # the prediction may differ from reality by this part


def sleep(x: int) -> int:
    time.sleep(_ELEMENT_S)
    return x


def compute(x: int) -> int:
    until = time.thread_time() + _ELEMENT_S
    while time.thread_time() < until:
        pass
    return x


class SlowModel(ModelHandler[int, int, float]):
    """A model that takes a fixed time for each batch, and a time for each example."""

    def load_model(self) -> float:
        time.sleep(0.5)
        return 2.0

    def run_inference(self, batch: Sequence[int], model: float, inference_args: Any = None) -> list[int]:
        time.sleep(_MODEL_FIXED_S + _MODEL_EACH_S * len(batch))
        return [round(model * each) for each in batch]


def numbers(pipeline: beam.Pipeline) -> Any:
    return pipeline | beam.Create(range(_ELEMENTS)) | beam.Reshuffle()


def warm_up(pipeline: beam.Pipeline) -> None:
    """Start the fork server: later runs of this process find it."""
    _ = pipeline | beam.Create([1])


def sleeping(pipeline: beam.Pipeline) -> None:
    _ = numbers(pipeline) | beam.Map(sleep)


def computing(pipeline: beam.Pipeline) -> None:
    _ = numbers(pipeline) | beam.Map(compute)


def two_pools(pipeline: beam.Pipeline) -> None:
    # The model has a pool of its own, with a worker for each accelerator that --accelerators declares.
    model = RunInference(SlowModel()).with_resource_hints(accelerator="type:nvidia-tesla-t4;count:1")
    _ = numbers(pipeline) | beam.Map(sleep) | "To the model" >> beam.Reshuffle() | model | beam.Map(lambda x: x)


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[beam.Pipeline], None]
    killed_at: tuple[float, ...] = ()


CASES = (
    Case("sleeping", sleeping),
    Case("computing", computing),
    Case("two_pools", two_pools),
    Case("killed", sleeping, (_KILL_AT_S,)),
)


class Killer:
    """Kills the first worker of a run at given times after its start."""

    def __init__(self, times: Sequence[float]) -> None:
        self._times = times
        self._timers: list[threading.Timer] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, WorkerStarted) and not self._timers:
            for seconds in self._times:
                timer = threading.Timer(max(0.0, seconds - event.seconds), os.kill, (event.pid, signal.SIGKILL))
                timer.daemon = True
                timer.start()
                self._timers.append(timer)

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()


def measured(case: Case, workers: int, folder: Path, killed_at: Sequence[float] = ()) -> Record:
    """Run a case, and return its record."""
    killer = Killer(killed_at)
    flags = [f"--cpu_workers={workers}", f"--accelerators={workers}", "--progress=off", f"--run_dir={folder}"]
    options = PipelineOptions(flags)
    with beam.Pipeline(runner=LuminosityRunner(on_event=killer), options=options) as pipeline:
        case.build(pipeline)
    killer.stop()
    return records.find(folder, "last")


def compare(case: Case, folder: Path) -> float:
    """Print one case; return the prediction divided by reality."""
    one = measured(case, 1, folder)
    two = measured(case, 2, folder, case.killed_at)
    assert one.last is not None
    assert two.last is not None
    orders = tuple(PoolOrder(pool.name, pool.workers) for pool in two.started.pools)
    scenario = Scenario(pools=orders, cores=float(os.cpu_count() or 1), lost_at=case.killed_at)
    found = forecast(one, scenario, load_prices(None))
    low, predicted, high = found.seconds
    ratio = predicted / two.last.seconds
    self_check = f"(simulated: {found.check.simulated_seconds:.2f} s)"
    print(f"{case.name}: one worker took {one.last.seconds:.2f} s {self_check}")
    print(f"  two workers: predicted {predicted:.2f} s ({low:.2f} to {high:.2f}), took {two.last.seconds:.2f} s")
    print(f"  ratio {ratio:.3f}{'' if abs(ratio - 1) <= _TARGET else ', MISSED'}")
    for record in (one, two):
        assert record.last is not None
        starts = [f"{event.seconds:.2f}" for event in record.happenings if isinstance(event, WorkerStarted)]
        print(f"  workers started after {', '.join(starts)} s")
        for view in record.last.stages:
            used = f"{view.busy_seconds:.2f} s busy, {view.cpu_seconds:.2f} s CPU"
            print(f"    {view.id}: {used}, {view.bundles} bundles, {view.retries} retries", flush=True)
    return ratio


def main() -> None:
    logging.getLogger().setLevel(logging.ERROR)
    wanted = sys.argv[1:]
    chosen = [case for case in CASES if not wanted or case.name in wanted]
    if not chosen:
        raise SystemExit(f"found {wanted}, expected some of {[case.name for case in CASES]}")
    with tempfile.TemporaryDirectory() as folder:
        measured(Case("warm-up", warm_up), 1, Path(folder))
        ratios = {case.name: compare(case, Path(folder)) for case in chosen}
    worst = max(ratios.values(), key=lambda ratio: abs(ratio - 1))
    print(f"farthest from reality: {worst:.3f} of it (target: within {_TARGET:.0%})")


if __name__ == "__main__":
    main()
