"""Keeps models that were loaded ahead of the first element until their step is set up."""

from __future__ import annotations

import threading

from luminosity.inference.adapting.model_set import ModelSet
from luminosity.inference.steps.routing import LaneRouter
from luminosity.inference.steps.settings import StepSettings

__all__ = ["load_models", "release_models"]

_lock = threading.Lock()
"""Protects the two variables below."""
_kept: dict[str, LaneRouter] = {}
"""Routers that hold their models, by the id of their step."""
_set_up: set[str] = set()
"""The ids of steps that hold their models themselves."""


def load_models(models: ModelSet, settings: StepSettings) -> None:
    """Load a step's models before Beam sets the step up. Blocks until they are loaded.

    The model host is the same as the step's, so the step finds the models there, or waits for the same load.
    """
    settings.set_up_process()
    router = LaneRouter(models, settings)
    try:
        router.set_up()
    except BaseException:
        router.leave_all()
        raise
    with _lock:
        if settings.step_id not in _set_up:
            _kept[settings.step_id] = router
            return
    router.leave_all()


def release_models(settings: StepSettings) -> None:
    """Stop keeping the models of a step. Call it when the step has entered their lanes itself."""
    with _lock:
        _set_up.add(settings.step_id)
        router = _kept.pop(settings.step_id, None)
    if router is not None:
        router.leave_all()
