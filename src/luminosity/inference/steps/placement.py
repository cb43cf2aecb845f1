"""Chooses the process that holds a model: this worker, or the shared host of the machine."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from luminosity._shared.model_sizes import LocalShare, ModelSizes, return_free_memory
from luminosity.core import WorkerShare
from luminosity.errors import ModelTooLarge
from luminosity.inference.adapting.adapt import ModelSet
from luminosity.inference.handler import Handler
from luminosity.inference.host.host import ModelHost, device_of, host_of
from luminosity.inference.host.interface import LaneSettings
from luminosity.inference.host.session import Session
from luminosity.inference.shared_host.proxy import ProxySession, SharedHostProxy, shared_host_of
from luminosity.inference.steps.messages import StepSettings

__all__ = ["Host", "HostSession", "PlacedLane", "Placement"]

Host: TypeAlias = ModelHost | SharedHostProxy
HostSession: TypeAlias = Session | ProxySession

_WITHOUT_DEVICE = ("cpu", "remote")  # devices of models that any worker may load


class _Place(Enum):
    HERE = auto()
    SHARED = auto()
    BY_SIZE = auto()


@dataclass(frozen=True, eq=False)
class PlacedLane:
    """A lane that was entered, and its host."""

    host: Host
    lane: Any
    small: Hashable = None
    """The name under which a small model takes memory of this worker; None for all other models."""


class Placement:
    """Enters the lanes of one step at the host that suits their models.

    Beam shares the models of keys across processes, whatever their size. A small model costs more in another process
    than a second copy of it: examples and predictions are pickled, and one process computes for all workers. So a model
    that is shared only by this default is loaded by each worker, as long as the copies fit easily into memory.

    It belongs to one step object, which calls it from one thread at a time.
    """

    def __init__(self, models: ModelSet, settings: StepSettings) -> None:
        self._models = models
        self._settings = settings
        self._sizes = None if _may_change(settings) else ModelSizes.of_run()
        self._share = LocalShare.of_process(settings.memory_budget)
        self._places = {name: self._place_of(name) for name in models.handlers}

    def enter(
        self,
        model: Hashable,
        key: Hashable,
        make_handler: Callable[[], Handler[Any, Any, Any]],
        settings: LaneSettings,
    ) -> PlacedLane:
        """Enter the lane with this key for a model. Blocks while a model of unknown size is loaded."""
        place, here = self._places[model], self._host_here(model)
        if place is _Place.BY_SIZE:
            found = self._enter_if_small(here, str(self._models.handlers[model]), key, make_handler, settings)
            if found is not None:
                return found
        host = here if place is _Place.HERE else self._shared_host()
        return PlacedLane(host, host.enter(key, make_handler, settings))

    def leave(self, placed: PlacedLane) -> None:
        """Leave a lane that :meth:`enter` returned."""
        placed.host.leave(placed.lane)
        if placed.small is not None:
            self._share.give_back(placed.small)

    def _enter_if_small(
        self,
        here: ModelHost,
        kind: str,
        key: Hashable,
        make_handler: Callable[[], Handler[Any, Any, Any]],
        settings: LaneSettings,
    ) -> PlacedLane | None:
        """Enter a lane of this process's host; None if its model is not small."""
        assert self._sizes is not None
        return self._sizes.load_if_small(
            settings.model,
            kind,
            self._share,
            load=lambda: PlacedLane(here, here.enter(key, make_handler, settings), settings.model),
            measure=lambda: self._measure(here, key, make_handler, settings, kind),
        )

    def _measure(
        self,
        here: ModelHost,
        key: Hashable,
        make_handler: Callable[[], Handler[Any, Any, Any]],
        settings: LaneSettings,
        kind: str,
    ) -> PlacedLane | None:
        """Load a model to find its size, and drop it again if it is not small."""
        lane = here.enter(key, make_handler, settings)
        try:
            here.load(lane)
        except ModelTooLarge:
            pass  # The shared host may have room for it.
        except BaseException:
            # The lane's examples fail with the error of their own load, or become dead letters.
            return PlacedLane(here, lane)
        size = here.size_of(lane)
        assert self._sizes is not None
        self._sizes.add(settings.model, kind, size)
        if self._share.take(settings.model, size):
            return PlacedLane(here, lane, settings.model)
        here.leave(lane)
        here.unload(lane)
        return_free_memory()
        return None

    def _place_of(self, name: Hashable) -> _Place:
        if not self._models.is_shared or _is_alone(self._settings):
            # A worker that is alone needs no shared host: the only worker of a device already holds its models.
            return _Place.HERE
        if (
            self._sizes is not None
            and self._models.is_shared_by_default(name)
            and device_of(self._models.handlers[name]) in _WITHOUT_DEVICE
        ):
            return _Place.BY_SIZE
        return _Place.SHARED

    def _host_here(self, name: Hashable) -> ModelHost:
        settings = self._settings
        return host_of(self._models.handlers[name], settings.memory_budget, settings.workers or 1)

    def _shared_host(self) -> Host:
        settings = self._settings
        limits = settings.memory_budget, settings.threads, settings.model_cache
        return shared_host_of(_host_id(settings.run_id), *limits, settings.run)


def _host_id(run_id: str) -> str:
    """Return the id of the shared host: if steps of a run have several Python environments, each has a host."""
    return hashlib.sha256(f"{run_id} {sys.prefix}".encode()).hexdigest()[:32]


def _may_change(settings: StepSettings) -> bool:
    """Return whether a model gets new versions, which must be loaded beside the old one, or may be given up."""
    return settings.load_late or settings.watch is not None or settings.use_subprocess


def _is_alone(settings: StepSettings) -> bool:
    share = WorkerShare.current()
    if share.pool:
        return bool(share.devices) or share.workers == 1
    return settings.workers == 1
