"""Routes a step's examples to lanes: to which model, which version of it, and which host."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from apache_beam import pvalue

from luminosity.inference.adapting.isolated import IsolatedHandler
from luminosity.inference.adapting.model_set import THE_MODEL, ModelSet
from luminosity.inference.adapting.registered import RegisteredHandler
from luminosity.inference.adapting.wrapping import NewVersion
from luminosity.inference.blocks import take
from luminosity.inference.handler import Handler
from luminosity.inference.host.interface import Ahead, Host
from luminosity.inference.host.lane import LaneSettings
from luminosity.inference.host.model import Family
from luminosity.inference.steps.counters import StepCounters
from luminosity.inference.steps.messages import PreparedBlock
from luminosity.inference.steps.placement import PlacedLane, Placement
from luminosity.inference.steps.settings import StepSettings
from luminosity.inference.steps.versions import Versions, version_of_all, versions_of_keys
from luminosity.inference.steps.watch import Version

__all__ = ["EnteredLane", "LaneRouter"]

_LONGEST_WAIT_IN_STREAM_S = 0.1  # for a full batch, as long as the handler's author says nothing else


@dataclass(frozen=True, eq=False)
class EnteredLane:
    """A lane that a step has entered, with its host and the counters of its model."""

    placed: PlacedLane
    counters: StepCounters

    @property
    def host(self) -> Host:
        """The host that the lane belongs to."""
        return self.placed.host

    @property
    def lane(self) -> Any:
        """The lane."""
        return self.placed.lane


class LaneRouter:
    """Routes the examples of one step to the lanes of their models and versions.

    A step has a router for each set of models. The router enters a lane with its first example, follows new versions
    of a model, and leaves the lanes of old versions. It belongs to one step object, which Beam calls from one thread at
    a time; that step calls :meth:`leave_all` in its teardown.
    """

    def __init__(self, models: ModelSet, settings: StepSettings) -> None:
        self._models = models
        self._settings = settings
        self._entered: dict[tuple[Hashable, str], EnteredLane] = {}
        """By model and path of the version."""
        self._by_lane: dict[Any, EnteredLane] = {}
        self._versions = Versions(self._load_ahead, self._take_over, settings.updates_may_lag)
        watch = settings.watch
        self._watcher = None if watch is None else watch.watcher(models.keys or [THE_MODEL])
        self._last_metadata: tuple[Any, Mapping[Hashable, Version]] = (None, {})

    def set_up(self) -> None:
        """Set up the handlers, and load the model of a step without keys; blocks until it is loaded."""
        handlers = self._models.handlers
        for handler in handlers.values():
            handler.set_environment_vars()
        self._placement = Placement(self._models, self._settings)
        if not self._settings.load_late and not self._models.is_keyed:
            entered = self._enter(THE_MODEL, Version())
            entered.host.load(entered.lane)

    def route(self, block: PreparedBlock, metadata: Any) -> Iterator[tuple[EnteredLane, PreparedBlock]]:
        """Split a block by the lanes of its examples, usually into one part.

        ``metadata`` is the value of the side input ``model_metadata_pcoll``, if there is one.
        """
        if not self._models.is_keyed:
            yield self.only_lane(metadata), block
            return
        named = self._named_by(metadata)
        keys = [example[0] for example in block.examples]
        lanes: dict[Hashable, EnteredLane] = {}
        for key in dict.fromkeys(keys):
            wanted = named.get(key) or self._wanted(block.model, key, None)
            lanes[key] = self._enter(block.model, self._versions.next(block.model, key, wanted))
        different = list(dict.fromkeys(lanes.values()))
        for lane in different:
            chosen = [lanes[key] is lane for key in keys]
            yield lane, block if len(different) == 1 else _part(block, np.flatnonzero(chosen))

    def only_lane(self, metadata: Any = None) -> EnteredLane:
        """Return the lane for all examples, if there is one model and no keys."""
        wanted = self._wanted(THE_MODEL, THE_MODEL, metadata)
        return self._enter(THE_MODEL, self._versions.next(THE_MODEL, THE_MODEL, wanted))

    def find(self, lane: Any) -> EnteredLane | None:
        """Return the entry of a lane, or None if this router has not entered it."""
        return self._by_lane.get(lane)

    def look_for_updates(self) -> None:
        """Switch to versions that have appeared, while the step submits nothing; waiting examples may get them."""
        if self._watcher is not None:
            for model, key in self._versions.known():
                self._versions.next(model, key, self._wanted(model, key, None))

    def count_loads(self) -> None:
        """Count the loads of all versions, with one request to each host."""
        by_host: dict[Host, list[EnteredLane]] = {}
        for entered in self._entered.values():
            by_host.setdefault(entered.host, []).append(entered)
        for host, lanes in by_host.items():
            loads = host.take_load_stats([entered.lane for entered in lanes])
            for entered, stats in zip(lanes, loads, strict=True):
                entered.counters.update([], stats)

    def leave_all_but(self, used: Collection[EnteredLane]) -> None:
        """Leave the lanes of old versions: those that were not used, and that no key uses or waits for."""
        needed = self._versions.needed()
        for each, entered in list(self._entered.items()):
            if entered not in used and each not in needed:
                self._placement.leave(entered.placed)
                del self._entered[each], self._by_lane[entered.lane]

    def leave_all(self) -> None:
        """Leave all lanes."""
        for entered in self._entered.values():
            self._placement.leave(entered.placed)
        self._entered, self._by_lane = {}, {}

    def _wanted(self, model: Hashable, key: Hashable, metadata: Any) -> Version:
        """Return the version that the watched files, the registry or the side input name, or the current one."""
        if self._watcher is not None:
            return self._watcher.newest(key)
        if not metadata or isinstance(metadata, pvalue.EmptySideInput):
            return self._versions.current(model, key)
        return version_of_all(metadata)

    def _named_by(self, metadata: Any) -> Mapping[Hashable, Version]:
        """Return the version of each key; if a window names none, the last ones that were named."""
        if not metadata or isinstance(metadata, pvalue.EmptySideInput):
            return self._last_metadata[1]
        if metadata is not self._last_metadata[0]:
            self._last_metadata = metadata, versions_of_keys(metadata, self._models)
        return self._last_metadata[1]

    def _load_ahead(self, model: Hashable, version: Version, instead_of: Version | None) -> Ahead:
        entered = self._enter(model, version)
        return entered.host.load_ahead(
            entered.lane, None if instead_of is None else self._enter(model, instead_of).lane
        )

    def _take_over(self, model: Hashable, old: Version, new: Version) -> None:
        entered = self._enter(model, old)
        entered.host.take_over(entered.lane, self._enter(model, new).lane)

    def _enter(self, model: Hashable, version: Version) -> EnteredLane:
        entered = self._entered.get((model, version.path))
        if entered is None:
            placed = self._placement.enter(
                model,
                (self._settings.step_id, model, version.path),
                lambda: self._handler(model, version),
                self._lane_settings(model, version.path),
            )
            prefixes = [version.name]
            if self._models.is_keyed:
                prefixes = ["", f"{model}-{version.name}-" if version.path else f"{model}-"]
            counters = StepCounters(placed.lane.handler, self._settings.metrics_namespace, prefixes)
            entered = EnteredLane(placed, counters)
            self._entered[model, version.path] = self._by_lane[placed.lane] = entered
        return entered

    def _handler(self, model: Hashable, version: Version) -> Handler[Any, Any, Any]:
        handler = self._models.handlers[model]
        registered = version.registered
        if not version.path:
            registered = self._settings.registered.get(model)
        else:
            handler = NewVersion(deepcopy(handler), handler)
            if registered is None:
                handler.update_model_path(version.path)
        if registered is not None:
            handler = RegisteredHandler(handler, registered)
        return IsolatedHandler(handler) if self._settings.use_subprocess else handler

    def _lane_settings(self, model: Hashable, path: str) -> LaneSettings:
        settings, most = self._settings, self._models.most_at_once
        return LaneSettings(
            model=(settings.model_tag, model, path, settings.use_subprocess),
            label=self._label(model, path),
            family=None if most is None else Family(settings.model_tag, most),
            inference_args=settings.inference_args,
            isolate_failures=bool(settings.caught),
            timeout=settings.timeout,
            clock=settings.clock,
            longest_wait=_LONGEST_WAIT_IN_STREAM_S if settings.is_stream else math.inf,
        )

    def _label(self, model: Hashable, path: str) -> str:
        handler = self._models.handlers[model]
        key = f"key {model!r}" if self._models.is_keyed else ""
        return ", ".join(filter(None, [str(handler), key, path or handler.model_id]))


def _part(block: PreparedBlock, places: Any) -> PreparedBlock:
    return replace(
        block,
        examples=take(block.examples, places),
        timestamps=take(block.timestamps, places),
        prepared=None if block.prepared is None else take(block.prepared, places),
        costs=block.costs[places],
        weights=None if block.weights is None else block.weights[places],
        seconds=block.seconds * len(places) / len(block.examples),
    )
