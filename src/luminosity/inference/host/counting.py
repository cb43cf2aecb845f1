"""Beam's metrics from the host's own threads."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from apache_beam.metrics.execution import MetricsEnvironment
from apache_beam.runners.worker import statesampler

__all__ = ["counted_for", "current_metrics_container"]


def current_metrics_container() -> Any:
    """Where this thread's step counts; None outside a bundle."""
    return MetricsEnvironment.current_container()


class _StepTracker:
    """Stands for Beam's tracker in a thread that belongs to no bundle: one step, known from the start."""

    def __init__(self, metrics_container: Any) -> None:
        self.metrics_container = metrics_container

    def current_state(self) -> _StepTracker:
        return self

    def update_metric(self, name: Any, value: Any) -> None:
        self.metrics_container.get_metric_cell(name).update(value)


@contextmanager
def counted_for(metrics_container: Any) -> Generator[None]:
    """Count what this thread counts for that step: Beam finds the step by thread."""
    if metrics_container is None:
        yield
        return
    statesampler.set_current_tracker(_StepTracker(metrics_container))
    try:
        yield
    finally:
        statesampler.set_current_tracker(None)
