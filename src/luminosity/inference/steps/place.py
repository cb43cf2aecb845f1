"""Where a step's model lives: in its own process."""

from __future__ import annotations

from typing import Any

from luminosity.inference.handler import Handler
from luminosity.inference.host.contact import Host
from luminosity.inference.host.hosts import host_of
from luminosity.inference.model_set import ModelSet
from luminosity.inference.steps.settings import StepSettings

__all__ = ["host_for"]


def host_for(handler: Handler[Any, Any, Any], models: ModelSet, settings: StepSettings) -> Host:
    return host_of(handler, settings.memory_budget, settings.workers or 1)
