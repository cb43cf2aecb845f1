"""The shared host as a worker process sees it: the same interface as a model host in the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from apache_beam.internal import pickler

from luminosity.inference.handler import Handler
from luminosity.inference.host.interface import Ahead
from luminosity.inference.host.lane import LaneSettings
from luminosity.inference.host.model import LoadStats
from luminosity.inference.options import ModelCacheConfig
from luminosity.inference.shared_host.connections import HostConnections
from luminosity.inference.shared_host.proxy_session import ProxySession
from luminosity.inference.shared_host.requests import LaneSpec

__all__ = ["ProxyLane", "SharedHostProxy", "shared_host_of"]


@dataclass(frozen=True, eq=False)
class ProxyLane:
    """A lane of the shared host."""

    key: Hashable
    handler: Handler[Any, Any, Any]
    settings: LaneSettings


class SharedHostProxy:
    """Forwards the calls of all threads of this process to the shared host."""

    def __init__(
        self, run_id: str, memory_budget: int | None, threads: int | None, model_cache: ModelCacheConfig
    ) -> None:
        self._connections = HostConnections(run_id)
        self._spec_settings = memory_budget, threads, model_cache
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
    run_id: str, memory_budget: int | None, threads: int | None, model_cache: ModelCacheConfig
) -> SharedHostProxy:
    """Return this process's proxy for the shared host of a run. A forked process gets a new one."""
    with _lock:
        key = os.getpid(), run_id
        for old in [each for each in _proxies if each[0] != os.getpid()]:
            del _proxies[old]
        proxy = _proxies.get(key)
        if proxy is None:
            proxy = _proxies[key] = SharedHostProxy(run_id, memory_budget, threads, model_cache)
        return proxy
