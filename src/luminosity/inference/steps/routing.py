"""Routes a step's examples to lanes: to which model, version and host; and counts the work of each model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from apache_beam import pvalue
from apache_beam.metrics import Metrics
from apache_beam.ml.inference.base import _MetricsCollector  # pyright: ignore[reportPrivateUsage]

from luminosity._shared.kafka_metrics import TimeCounters
from luminosity.core import InferenceMetrics
from luminosity.inference.adapting.adapt import THE_MODEL, ModelSet
from luminosity.inference.adapting.isolated import IsolatedHandler
from luminosity.inference.adapting.wrapping import NewVersion, RegisteredHandler
from luminosity.inference.blocks import take
from luminosity.inference.handler import Handler
from luminosity.inference.host.interface import Ahead, BatchStats, Family, LaneSettings, LoadStats
from luminosity.inference.steps.carried import taken
from luminosity.inference.steps.messages import PreparedBlock, StepSettings
from luminosity.inference.steps.placement import Host, PlacedLane, Placement
from luminosity.inference.steps.versions import Version, Versions, version_of_all, versions_of_keys

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
        examples=taken(block.examples, places),
        timestamps=take(block.timestamps, places),
        prepared=None if block.prepared is None else take(block.prepared, places),
        costs=block.costs[places],
        weights=None if block.weights is None else block.weights[places],
        seconds=block.seconds * len(places) / len(block.examples),
    )


_FIRST_BATCHES = 2  # of a worker: they take longer, since libraries and devices prepare themselves


class StepCounters:
    """Counts the work of one model. Call it on a bundle's thread: Beam finds the step by the thread."""

    def __init__(self, handler: Handler[Any, Any, Any], namespace: str, prefixes: Sequence[str]) -> None:
        """``prefixes``: for each, a set of Beam's own counters, whose names begin with it, counts everything."""
        overridden = handler.override_metrics(namespace)
        self._beam = [] if overridden else [_MetricsCollector(namespace, prefix) for prefix in prefixes]
        self._namespace = namespace
        self._times = TimeCounters(namespace, InferenceMetrics.LATENCY)
        self._batches = 0

    def prepared(self, seconds: float) -> None:
        """Count the time of preparing a block."""
        self._add_seconds(InferenceMetrics.PREPARE, seconds)

    def repeated(self, count: int) -> None:
        """Count rows that got the prediction of an equal row."""
        self._add(InferenceMetrics.EXAMPLES, count)
        self._add(InferenceMetrics.REPEATED_ROWS, count)

    def update(self, batches: list[BatchStats], loads: list[LoadStats]) -> None:
        """Count batches and loads."""
        for beam in self._beam:
            self._update_beam(beam, batches, loads)
        self._add(InferenceMetrics.LOADS, len(loads))
        self._add(InferenceMetrics.LOAD, sum(load.milli_secs for load in loads) * 1000)
        self._add(InferenceMetrics.MODEL_BYTES, sum(load.num_bytes // load.copies for load in loads))
        noted = Counter[str]()
        for batch in batches:
            noted.update(batch.notes)
        for name, amount in noted.items():
            self._add(name, amount)
        done = [batch for batch in batches if not batch.failed]
        self._add(InferenceMetrics.OUT_OF_MEMORY, sum(batch.out_of_memory for batch in batches))
        if not done:
            return
        self._add(InferenceMetrics.EXAMPLES, sum(batch.count for batch in done))
        self._add(InferenceMetrics.BATCHES, len(done))
        self._add(InferenceMetrics.USEFUL_COST, sum(batch.useful for batch in done))
        self._add(InferenceMetrics.PADDED_COST, sum(batch.padded for batch in done))
        self._add(InferenceMetrics.BUDGET_COST, sum(max(batch.budget, batch.padded) for batch in done))
        self._add_seconds(InferenceMetrics.QUEUE_WAIT, sum(batch.waited for batch in done))
        self._add_seconds(InferenceMetrics.COLLATE, sum(batch.collate for batch in done))
        self._add_seconds(InferenceMetrics.TRANSFER, sum(batch.transfer for batch in done))
        self._add_seconds(InferenceMetrics.COMPUTE, sum(batch.compute for batch in done))
        self._add_seconds(InferenceMetrics.RETURN, sum(batch.collect for batch in done))
        self._add_seconds(InferenceMetrics.DEVICE_BUSY, sum(batch.busy for batch in done))
        self._times.count(np.array([batch.latency_micro_secs // 1000 for batch in done]))
        self._update_line(done[max(0, _FIRST_BATCHES - self._batches) :])
        self._batches += len(done)

    def _update_line(self, batches: list[BatchStats]) -> None:
        """Count the sums of which the line of least squares through the batches' times is made."""
        points = [(round(batch.padded), round(batch.busy * 1e6)) for batch in batches]
        self._add(InferenceMetrics.LINE_BATCHES, len(points))
        self._add(InferenceMetrics.LINE_COST, sum(cost for cost, _ in points))
        self._add(InferenceMetrics.LINE_SECONDS, sum(micros for _, micros in points))
        self._add_large(InferenceMetrics.LINE_COST_SQUARED, sum(cost * cost for cost, _ in points))
        self._add_large(InferenceMetrics.LINE_PRODUCT, sum(cost * micros for cost, micros in points))

    def _update_beam(self, beam: _MetricsCollector, batches: list[BatchStats], loads: list[LoadStats]) -> None:
        for load in loads:
            beam.update_load_model_metrics(load.milli_secs, load.num_bytes)
        for batch in batches:
            if batch.failed:
                beam.failed_batches_counter.inc()
            else:
                beam.update(batch.count, batch.num_bytes, batch.latency_micro_secs)

    def _add(self, name: str, amount: float) -> None:
        if amount:
            Metrics.counter(self._namespace, name).inc(int(amount))

    def _add_large(self, name: str, amount: int) -> None:
        high, low = divmod(amount, 1 << 32)
        self._add(name, low)
        self._add(name + InferenceMetrics.HIGH, high)

    def _add_seconds(self, name: str, seconds: float) -> None:
        self._add(name, seconds * 1e6)
