"""Where a step's model lives: in its own process, or once for the machine."""

from __future__ import annotations

from typing import Any

from luminosity.core import WorkerShare
from luminosity.inference.handler import Handler
from luminosity.inference.host.contact import Host
from luminosity.inference.host.hosts import host_of
from luminosity.inference.machine.host import machine_host_of
from luminosity.inference.model_set import ModelSet
from luminosity.inference.steps.settings import StepSettings

__all__ = ["host_for"]


def host_for(handler: Handler[Any, Any, Any], models: ModelSet, settings: StepSettings) -> Host:
    """Models that are to be shared across processes live in one of their own, unless there is no other to share with.

    The one worker that has a device is such a process: it is the machine's host for that device, without a hop.
    """
    if models.is_shared and not _is_alone(settings):
        return machine_host_of(settings.run_id, settings.memory_budget, settings.threads, settings.model_cache)
    return host_of(handler, settings.memory_budget, settings.workers or 1)


def _is_alone(settings: StepSettings) -> bool:
    share = WorkerShare.current()
    if share.pool:
        return bool(share.devices) or share.workers == 1
    return settings.workers == 1
