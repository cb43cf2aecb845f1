"""The shared host as a worker process sees it: the same interface as a model host in the process.

The shared host may die while a session lasts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from apache_beam.internal import pickler

from luminosity._shared.hangs import Wait, waiting_for
from luminosity.errors import HostUnavailable
from luminosity.inference.blocks import Block, Indices, take
from luminosity.inference.handler import Handler
from luminosity.inference.host.interface import Ahead, BatchStats, LaneSettings, LoadStats, Outcome
from luminosity.inference.ipc.channel import Channel, ConnectionClosed
from luminosity.inference.options import ModelCacheConfig
from luminosity.inference.run_settings import RunSettings
from luminosity.inference.shared_host.connections import MOST_DEATHS, HostConnections, LaneSpec, UnknownLane, request

__all__ = ["ProxyLane", "ProxySession", "SharedHostProxy", "shared_host_of"]


@dataclass(frozen=True, eq=False)
class ProxyLane:
    """A lane of the shared host."""

    key: Hashable
    handler: Handler[Any, Any, Any]
    settings: LaneSettings


class SharedHostProxy:
    """Forwards the calls of all threads of this process to the shared host."""

    def __init__(
        self,
        run_id: str,
        memory_budget: int | None,
        threads: int | None,
        model_cache: ModelCacheConfig,
        run: RunSettings | None = None,
    ) -> None:
        self._connections = HostConnections(run_id)
        self._spec_settings = memory_budget, threads, model_cache, run or RunSettings()
        self._lock = threading.Lock()
        """Protects ``_lanes``; held while a lane is entered or left, so that threads do it one after another."""
        self._lanes: dict[Hashable, tuple[ProxyLane, int]] = {}
        """The lanes that this process has entered, and how often."""

    def enter(
        self, key: Hashable, make_handler: Callable[[], Handler[Any, Any, Any]], settings: LaneSettings
    ) -> ProxyLane:
        """Return the lane with this key; the first call enters it, and starts the shared host if there is none."""
        with self._lock:
            lane, users = self._lanes.get(key, (None, 0))
            if lane is None:
                handler = make_handler()
                self._connections.enter(LaneSpec(key, pickler.dumps((handler, settings)), *self._spec_settings))
                lane = ProxyLane(key, handler, settings)
            self._lanes[key] = lane, users + 1
            return lane

    def leave(self, lane: ProxyLane) -> None:
        """Leave a lane, once for each time that it was entered."""
        with self._lock:
            _, users = self._lanes[lane.key]
            if users > 1:
                self._lanes[lane.key] = lane, users - 1
                return
            del self._lanes[lane.key]
            self._connections.leave(lane.key)

    def open(self, step: Any = None) -> ProxySession:
        """Open a session for the calling thread; ``step`` means nothing to another process."""
        return ProxySession(self._connections, self._find)

    def load(self, lane: ProxyLane) -> None:
        """Block until the lane's model is in memory; raise the error of its load."""
        self._connections.request("load", lane.key)

    def load_ahead(self, lane: ProxyLane, instead_of: ProxyLane | None = None) -> Ahead:
        """Request a model before there is work for it, and return how far its load is."""
        return self._connections.request("load_ahead", lane.key, None if instead_of is None else instead_of.key)

    def take_over(self, old: ProxyLane, new: ProxyLane) -> None:
        """Move the examples of a lane that are not yet cut into batches to another lane."""
        self._connections.request("take_over", old.key, new.key)

    def take_load_stats(self, lanes: list[ProxyLane]) -> list[list[LoadStats]]:
        """Return, for each lane, the loads of its model since the last call of any worker."""
        return self._connections.request("take_load_stats", [lane.key for lane in lanes])

    def _find(self, key: Hashable) -> ProxyLane | None:
        with self._lock:
            lane, _ = self._lanes.get(key, (None, 0))
            return lane


_lock = threading.Lock()
"""Protects ``_proxies``."""
_proxies: dict[tuple[int, str], SharedHostProxy] = {}


def shared_host_of(
    run_id: str,
    memory_budget: int | None,
    threads: int | None,
    model_cache: ModelCacheConfig,
    run: RunSettings | None = None,
) -> SharedHostProxy:
    """Return this process's proxy for the shared host of a run. A forked process gets a new one."""
    with _lock:
        key = os.getpid(), run_id
        for old in [each for each in _proxies if each[0] != os.getpid()]:
            del _proxies[old]
        proxy = _proxies.get(key)
        if proxy is None:
            proxy = _proxies[key] = SharedHostProxy(run_id, memory_budget, threads, model_cache, run)
        return proxy


class _Keyed(Protocol):
    """A lane, by its key."""

    @property
    def key(self) -> Hashable: ...


@dataclass
class _Sent:
    """A submitted block, and which of its examples have no outcome yet."""

    lane: _Keyed
    prepared: Block
    costs: Any
    weights: Any
    tag: Any
    places: Indices
    """The places of the examples that were sent last; the host counts from 0 in these."""
    missing: Any
    """For each example, whether its outcome has not arrived."""


class ProxySession:
    """Submits blocks to the shared host and collects their outcomes; belongs to one thread.

    It keeps each block until the outcomes are here, so that another host can compute it if the current one dies. Each
    request has one response, so neither side blocks because the other does not receive.
    """

    def __init__(self, connections: HostConnections, find_lane: Callable[[Hashable], Any | None]) -> None:
        """``find_lane`` returns the lane of this process with a key, if it has entered that lane."""
        self._connections = connections
        self._find_lane = find_lane
        self._channel: Channel | None = None
        self._sent: dict[int, _Sent] = {}
        self._last_number = 0
        self._outcomes: list[Outcome] = []
        self._deaths = 0

    def submit(self, lane: _Keyed, prepared: Block, costs: Any, tag: Any, weights: Any = None) -> None:
        """Add a block to a lane; block while the lane is full."""
        self._last_number += 1
        places = np.arange(len(prepared))
        sent = _Sent(lane, prepared, costs, weights, tag, places, np.ones(len(prepared), bool))
        self._sent[self._last_number] = sent
        try:
            self._send(self._last_number)
        except (ConnectionClosed, UnknownLane) as error:
            self._start_over(error)

    def ready(self) -> list[Outcome]:
        """Return the outcomes that have arrived, without blocking."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def finish(self) -> Iterator[list[Outcome]]:
        """Yield all remaining outcomes as they arrive."""
        while self._sent:
            try:
                outcomes, is_all = self._request("more")
                self._take(outcomes)
                if is_all and self._sent:
                    raise HostUnavailable("the shared model host ended the session before all examples had an outcome")
            except (ConnectionClosed, UnknownLane) as error:
                self._start_over(error)
            if self._outcomes:
                yield self.ready()
        yield self.ready()

    def take_stats(self) -> dict[Any, list[BatchStats]]:
        """Return the statistics of this session's batches, by lane; ends the session.

        What a host computed before it died is not counted.
        """
        by_key = self._end()
        # Another worker may have moved examples to a version that this process has not entered; then use its key.
        return {self._find_lane(key) or key: stats for key, stats in by_key.items()}

    def close(self) -> None:
        """Close the session and discard its examples that are not yet computed."""
        if self._sent and self._channel is not None:
            self._channel.close()  # The host notices, and discards the examples.
            self._channel = None
        self._end()

    def _end(self) -> dict[Any, list[BatchStats]]:
        channel, self._channel = self._channel, None
        if channel is None:
            return {}
        try:
            stats = request(channel, "close")
        except ConnectionClosed:
            channel.close()
            return {}
        self._connections.give_back(channel)
        return stats

    def _send(self, number: int) -> None:
        """Send the examples of a block that have no outcome yet."""
        sent = self._sent[number]
        sent.places = np.flatnonzero(sent.missing)
        prepared, weights = sent.prepared, sent.weights
        if len(sent.places) < len(sent.missing):
            prepared = take(prepared, sent.places)
            weights = None if weights is None else weights[sent.places]
        self._take(self._request("submit", sent.lane.key, number, prepared, sent.costs[sent.places], weights))

    def _take(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self._deaths = 0
            sent = self._sent[outcome.tag]
            places = sent.places[outcome.places]
            sent.missing[places] = False
            if not sent.missing.any():
                del self._sent[outcome.tag]
            self._outcomes.append(replace(outcome, tag=sent.tag, places=places))

    def _request(self, name: str, *arguments: Any) -> Any:
        if self._channel is None:
            self._channel = self._connections.channel()
        channel, begun = self._channel, time.monotonic()
        keys = list(dict.fromkeys(sent.lane.key for sent in self._sent.values()))

        def describe() -> Wait:
            return self._connections.describe_wait(channel, keys, time.monotonic() - begun)

        with waiting_for(describe):
            return request(channel, name, *arguments)

    def _start_over(self, error: Exception) -> None:
        """Send everything without an outcome again: the host has died, or a new one has taken its place."""
        while True:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            self._deaths += isinstance(error, ConnectionClosed)
            if self._deaths > MOST_DEATHS:
                raise self._connections.died(self._deaths) from error
            try:
                self._connections.revive()
                for number in list(self._sent):
                    self._send(number)
                return
            except (ConnectionClosed, UnknownLane) as again:
                error = again
