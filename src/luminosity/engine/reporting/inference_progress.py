"""How the models of a stage do, from the counters of its committed bundles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from luminosity._shared.kafka_metrics import bucket_counts, bucket_names, percentile_ms
from luminosity.core import InferenceMetrics
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.stage import StageRun
from luminosity.events import InferenceView, ModelLoaded, ModelVersion

__all__ = ["LoadedModels", "Views", "inference_views"]

_NAMES = InferenceMetrics.ALL | bucket_names(InferenceMetrics.LATENCY)
_LEAST_BATCHES = 4  # for a line: fewer say more about chance than about the model
_LEAST_SPREAD = 0.02  # of the mean cost: the standard deviation of costs from which a line can be told
_MOST_LOADS = 20  # events at once, of one model
_NOTHING = InferenceView("")

Views: TypeAlias = Mapping[str, tuple[InferenceView, ...]]
"""The views of the models of each stage, by its id."""


def inference_views(stage: StageRun, metrics: RunMetrics) -> tuple[InferenceView, ...]:
    """Return a view for each model of a stage that has counted batches. Each model of a step has its own namespace."""
    by_step = metrics.counters(stage.id, _NAMES)
    worker_seconds = round(stage.busy.first_to_last_seconds * stage.pool.most_workers(), 3)
    return tuple(
        _view(
            step if len(by_namespace) == 1 else _model_step(step, namespace),
            counters,
            worker_seconds,
            bool(stage.pool.plan.device_groups),
        )
        for step, by_namespace in by_step.items()
        for namespace, counters in sorted(by_namespace.items())
        if counters.get(InferenceMetrics.BATCHES) or _is_refused(counters)
    )


def _is_refused(counters: Mapping[str, int]) -> bool:
    """Return whether a model's server has answered no request so far."""
    return bool(counters.get(InferenceMetrics.LOADS) and counters.get(InferenceMetrics.REQUESTS))


def _model_step(step: str, namespace: str) -> str:
    """Name the step after one model, if it is named after all of its models.

    >>> _model_step("Enrich/Infer language, tone", "tone")
    'Enrich/Infer tone'
    """
    parent, slash, label = step.rpartition("/")
    return f"{parent}{slash}{label.partition(' ')[0]} {namespace}"


def _view(step: str, counters: dict[str, int], worker_seconds: float, has_device: bool) -> InferenceView:
    def count(name: str) -> int:
        return counters.get(name, 0)

    def seconds(name: str) -> float:
        return round(count(name) / 1e6, 6)

    loads = count(InferenceMetrics.LOADS)
    fixed_seconds, seconds_per_cost = _line(counters)
    times = bucket_counts(counters, InferenceMetrics.LATENCY)
    return InferenceView(
        step,
        inferences=count(InferenceMetrics.EXAMPLES),
        batches=count(InferenceMetrics.BATCHES),
        useful_cost=count(InferenceMetrics.USEFUL_COST),
        padded_cost=count(InferenceMetrics.PADDED_COST),
        budget_cost=count(InferenceMetrics.BUDGET_COST),
        queue_wait_seconds=seconds(InferenceMetrics.QUEUE_WAIT),
        prepare_seconds=seconds(InferenceMetrics.PREPARE),
        collate_seconds=seconds(InferenceMetrics.COLLATE),
        transfer_seconds=seconds(InferenceMetrics.TRANSFER),
        compute_seconds=seconds(InferenceMetrics.COMPUTE),
        return_seconds=seconds(InferenceMetrics.RETURN),
        device_busy_seconds=seconds(InferenceMetrics.DEVICE_BUSY),
        worker_seconds=worker_seconds,
        out_of_memory=count(InferenceMetrics.OUT_OF_MEMORY),
        loads=loads,
        load_seconds=seconds(InferenceMetrics.LOAD),
        model_bytes=count(InferenceMetrics.MODEL_BYTES) // loads if loads else 0,
        fixed_seconds=fixed_seconds,
        seconds_per_cost=seconds_per_cost,
        runs_on="server" if count(InferenceMetrics.REQUESTS) else "device" if has_device else "worker",
        cut_texts=count(InferenceMetrics.CUT_TEXTS),
        requests=count(InferenceMetrics.REQUESTS),
        retries=count(InferenceMetrics.RETRIES),
        throttled=count(InferenceMetrics.THROTTLED),
        retry_wait_seconds=seconds(InferenceMetrics.RETRY_WAIT),
        batch_p50_ms=percentile_ms(times, 0.5),
        batch_p99_ms=percentile_ms(times, 0.99),
    )


def _line(counters: Mapping[str, int]) -> tuple[float, float]:
    """Return the line of least squares through the times of batches over their padded cost: at 0, and by unit.

    Both are 0 if there were too few batches, or if their costs were too alike to tell them apart.

    >>> costs = [10, 20, 40, 80]
    >>> micros = [500 + 7 * cost for cost in costs]
    >>> sums = {"line_batches": 4, "line_cost": sum(costs), "line_micro_secs": sum(micros)}
    >>> squares, products = sum(c * c for c in costs), sum(c * m for c, m in zip(costs, micros))
    >>> _line({**sums, "line_cost_squared": squares, "line_cost_micro_secs": products})
    (0.0005, 7e-06)
    """

    def large(name: str) -> int:
        return counters.get(name, 0) + (counters.get(name + InferenceMetrics.HIGH, 0) << 32)

    batches, cost = counters.get(InferenceMetrics.LINE_BATCHES, 0), counters.get(InferenceMetrics.LINE_COST, 0)
    micros = counters.get(InferenceMetrics.LINE_SECONDS, 0)
    spread = batches * large(InferenceMetrics.LINE_COST_SQUARED) - cost * cost
    if batches < _LEAST_BATCHES or spread <= (_LEAST_SPREAD * cost) ** 2:
        return 0.0, 0.0
    by_cost = (batches * large(InferenceMetrics.LINE_PRODUCT) - cost * micros) / spread
    by_cost = min(max(by_cost, 0.0), micros / cost)  # neither part can be below 0
    return float(f"{(micros - by_cost * cost) / batches / 1e6:.6g}"), float(f"{by_cost / 1e6:.6g}")


class LoadedModels:
    """Finds loads of models in the views of stages, to report each as an event."""

    def __init__(self, models: Iterable[ModelVersion], before: Views) -> None:
        """``models`` are the registered ones, whose names are known. Loads in ``before`` are of an earlier start."""
        self._names = {model.step: model.name for model in models}
        self._known = {(stage, view.step): view for stage, views in before.items() for view in views}

    def news(self, run: str, seconds: float, now: Views) -> list[ModelLoaded]:
        """Return an event for each load since the last call. Loads of a model at the same time have their mean time."""
        found: list[ModelLoaded] = []
        for stage, views in now.items():
            for view in views:
                before = self._known.get((stage, view.step), _NOTHING)
                new = view.loads - before.loads
                if new > 0:
                    mean = round((view.load_seconds - before.load_seconds) / new, 3)
                    event = ModelLoaded(
                        run,
                        seconds,
                        view.step,
                        self._names.get(view.step, ""),
                        load_seconds=mean,
                        model_bytes=view.model_bytes,
                    )
                    found += [event] * min(new, _MOST_LOADS)
                self._known[stage, view.step] = view
        return found
