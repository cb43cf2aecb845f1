"""The lanes of one step: which model and which version of it an example goes to."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from apache_beam import pvalue

from luminosity.core import WorkerShare
from luminosity.inference.adapting.isolated import IsolatedHandler
from luminosity.inference.adapting.model_set import THE_MODEL, ModelSet
from luminosity.inference.adapting.wrapping import NewVersion
from luminosity.inference.blocks import take
from luminosity.inference.handler import Handler
from luminosity.inference.host.hosts import host_of
from luminosity.inference.host.interface import Ahead, Host
from luminosity.inference.host.lane import LaneSettings
from luminosity.inference.host.model import Family
from luminosity.inference.shared_host.proxy import shared_host_of
from luminosity.inference.steps.counters import StepCounters
from luminosity.inference.steps.messages import PreparedBlock
from luminosity.inference.steps.settings import StepSettings
from luminosity.inference.steps.versions import Version, Versions, version_of_all, versions_of_keys
from luminosity.inference.steps.watch import Watcher

__all__ = ["EnteredLane", "LaneRouter", "host_for"]


@dataclass(frozen=True, eq=False)
class EnteredLane:
    """A lane that this step has entered."""

    host: Host
    lane: Any
    counters: StepCounters


class LaneRouter:
    def __init__(self, models: ModelSet, settings: StepSettings) -> None:
        self._models = models
        self._settings = settings
        self._uses: dict[tuple[Hashable, str], EnteredLane] = {}
        self._versions = Versions(self._load_ahead, self._take_over, settings.updates_may_lag)
        watch = settings.watch
        self._watcher = None if watch is None else Watcher(watch, models.keys or [THE_MODEL])
        self._last_metadata: tuple[Any, Mapping[Hashable, Version]] = (None, {})

    def set_up(self) -> None:
        handlers = self._models.handlers
        for handler in handlers.values():
            handler.set_environment_vars()
        self._hosts = {name: host_for(handler, self._models, self._settings) for name, handler in handlers.items()}
        if not self._settings.load_late and not self._models.is_keyed:
            use = self._use(THE_MODEL, Version())
            use.host.load(use.lane)

    def parts(self, block: PreparedBlock, metadata: Any) -> Iterator[tuple[EnteredLane, PreparedBlock]]:
        """The block by the versions that its examples get; most often that is one."""
        if not self._models.is_keyed:
            yield self.the_use(metadata), block
            return
        named = self._named_by(metadata)
        keys = [example[0] for example in block.examples]
        uses: dict[Hashable, EnteredLane] = {}
        for key in dict.fromkeys(keys):
            wanted = named.get(key) or self._wanted(block.model, key, None)
            uses[key] = self._use(block.model, self._versions.next(block.model, key, wanted))
        different = list(dict.fromkeys(uses.values()))
        for use in different:
            chosen = [uses[key] is use for key in keys]
            yield use, block if len(different) == 1 else _part(block, np.flatnonzero(chosen))

    def the_use(self, metadata: Any = None) -> EnteredLane:
        """What all examples get where there is one model, and no keys."""
        wanted = self._wanted(THE_MODEL, THE_MODEL, metadata)
        return self._use(THE_MODEL, self._versions.next(THE_MODEL, THE_MODEL, wanted))

    def look_for_updates(self) -> None:
        """While nothing new is handed over: what waits may get a version that has appeared meanwhile."""
        if self._watcher is not None:
            for model, key in self._versions.known():
                self._versions.next(model, key, self._wanted(model, key, None))

    def leave_all_but(self, used: Collection[EnteredLane]) -> None:
        """Old versions: what neither was used nor will be, unless a side input says so."""
        needed = self._versions.needed()
        for each, use in list(self._uses.items()):
            if use not in used and each not in needed:
                use.host.leave(use.lane)
                del self._uses[each]

    def leave_all(self) -> None:
        for use in self._uses.values():
            use.host.leave(use.lane)
        self._uses = {}

    def _wanted(self, model: Hashable, key: Hashable, metadata: Any) -> Version:
        """What the side input names, or the watched files; where they name none, what was used last."""
        if self._watcher is not None:
            path = self._watcher.newest(key)
            return Version(path, os.path.splitext(os.path.basename(path))[0])
        if not metadata or isinstance(metadata, pvalue.EmptySideInput):
            return self._versions.current(model, key)
        return version_of_all(metadata)

    def _named_by(self, metadata: Any) -> Mapping[Hashable, Version]:
        """The version of each key; what was named last where a window names none."""
        if not metadata or isinstance(metadata, pvalue.EmptySideInput):
            return self._last_metadata[1]
        if metadata is not self._last_metadata[0]:
            self._last_metadata = metadata, versions_of_keys(metadata, self._models)
        return self._last_metadata[1]

    def _load_ahead(self, model: Hashable, version: Version, instead_of: Version | None) -> Ahead:
        use = self._use(model, version)
        return use.host.load_ahead(use.lane, None if instead_of is None else self._use(model, instead_of).lane)

    def _take_over(self, model: Hashable, old: Version, new: Version) -> None:
        use = self._use(model, old)
        use.host.take_over(use.lane, self._use(model, new).lane)

    def count_loads(self) -> None:
        """Of all versions, with one request to each host."""
        by_host: dict[Host, list[EnteredLane]] = {}
        for use in self._uses.values():
            by_host.setdefault(use.host, []).append(use)
        for host, uses in by_host.items():
            loads = host.take_load_stats([use.lane for use in uses])
            for use, stats in zip(uses, loads, strict=True):
                use.counters.update([], stats)

    def use_of(self, lane: Any) -> EnteredLane | None:
        return next((use for use in self._uses.values() if use.lane is lane), None)

    def _use(self, model: Hashable, version: Version) -> EnteredLane:
        use = self._uses.get((model, version.path))
        if use is None:
            host, namespace = self._hosts[model], self._settings.metrics_namespace
            lane = host.enter(
                (self._settings.step_id, model, version.path),
                lambda: self._handler(model, version.path),
                self._lane_settings(model, version.path),
            )
            prefixes = [version.name]
            if self._models.is_keyed:
                prefixes = ["", f"{model}-{version.name}-" if version.path else f"{model}-"]
            use = EnteredLane(host, lane, StepCounters(lane.handler, namespace, prefixes))
            self._uses[model, version.path] = use
        return use

    def _handler(self, model: Hashable, path: str) -> Handler[Any, Any, Any]:
        handler = self._models.handlers[model]
        if path:
            handler = NewVersion(deepcopy(handler), handler)
            handler.update_model_path(path)
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


def host_for(handler: Handler[Any, Any, Any], models: ModelSet, settings: StepSettings) -> Host:
    """Models that are to be shared across processes live in one of their own, unless there is no other to share with.

    The one worker that has a device is such a process: it is the machine's host for that device, without a hop.
    """
    if models.is_shared and not _is_alone(settings):
        return shared_host_of(settings.run_id, settings.memory_budget, settings.threads, settings.model_cache)
    return host_of(handler, settings.memory_budget, settings.workers or 1)


def _is_alone(settings: StepSettings) -> bool:
    share = WorkerShare.current()
    if share.pool:
        return bool(share.devices) or share.workers == 1
    return settings.workers == 1
