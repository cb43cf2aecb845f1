"""What steps that run models tell of themselves."""

from __future__ import annotations

from luminosity.core import InferenceMetrics
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.stage import StageRun
from luminosity.events import InferenceView


def inference_views(stage: StageRun, metrics: RunMetrics) -> tuple[InferenceView, ...]:
    """One for each model of a stage that has counted batches. Models of one step have a namespace each."""
    by_step = metrics.counters(stage.id, InferenceMetrics.ALL)
    worker_seconds = round(stage.busy.first_to_last_seconds * stage.pool.pool.workers, 3)
    return tuple(
        _view(step if len(by_namespace) == 1 else _of_one(step, namespace), counters, worker_seconds)
        for step, by_namespace in by_step.items()
        for namespace, counters in sorted(by_namespace.items())
        if counters.get(InferenceMetrics.BATCHES)
    )


def _of_one(step: str, namespace: str) -> str:
    """A step may be called after all of its models.

    >>> _of_one("Enrich/Infer language, tone", "tone")
    'Enrich/Infer tone'
    """
    parent, slash, label = step.rpartition("/")
    return f"{parent}{slash}{label.partition(' ')[0]} {namespace}"


def _view(step: str, counters: dict[str, int], worker_seconds: float) -> InferenceView:
    def count(name: str) -> int:
        return counters.get(name, 0)

    def seconds(name: str) -> float:
        return round(count(name) / 1e6, 6)

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
    )
