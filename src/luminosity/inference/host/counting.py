"""Lets Beam count metrics and logs of the host's own threads for the right step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from apache_beam.runners.worker import statesampler

__all__ = ["as_part_of", "current_step"]


def current_step() -> Any:
    """Return the step that this thread runs, as Beam knows it, or None outside a bundle."""
    tracker = statesampler.get_current_tracker()
    return None if tracker is None else tracker.current_state()


class _OneStep:
    """Replaces Beam's state tracker in a thread that belongs to no bundle: it knows one step."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def current_state(self) -> Any:
        return self._step

    def update_metric(self, name: Any, value: Any) -> None:
        if self._step.metrics_container is not None:
            self._step.metrics_container.get_metric_cell(name).update(value)


@contextmanager
def as_part_of(step: Any) -> Generator[None]:
    """Count what this thread counts and logs for that step; Beam finds the step by the thread."""
    if step is None:
        yield
        return
    statesampler.set_current_tracker(_OneStep(step))
    try:
        yield
    finally:
        statesampler.set_current_tracker(None)
