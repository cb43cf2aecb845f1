"""A worker's side of the machine's model host: what a step asks of a host, asked of another process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from apache_beam.internal import pickler

from luminosity.core import THREAD_VARIABLES, WorkerShare, machine_ram_bytes, usable_cores
from luminosity.errors import HostUnavailable
from luminosity.inference.handler import Handler
from luminosity.inference.host.host import Ahead
from luminosity.inference.host.lane import LaneSettings
from luminosity.inference.host.model import LoadStats
from luminosity.inference.ipc.channel import Channel, ConnectionClosed
from luminosity.inference.ipc.client import connect, last_words
from luminosity.inference.ipc.folder import HostFolder
from luminosity.inference.options import ModelCacheConfig
from luminosity.inference.shared_host.proxy_session import SharedHostSession
from luminosity.inference.shared_host.requests import MOST_DEATHS, UnknownLane, request
from luminosity.inference.shared_host.service import LaneSpec, serve_client
from luminosity.inference.threads import variables_set_here

__all__ = ["SharedHost", "SharedLane", "shared_host_of"]

_START_S = 120.0
_ANSWER_S = 30.0
"""For what takes no time: a host that does not answer it is none."""
_END_S = 2.0
"""For the system to end a process whose connections are closed already."""
_MOST_FREE = 16


@dataclass(frozen=True, eq=False)
class SharedLane:
    """A lane of the host process, which is told of it again when another one has taken its place."""

    key: Hashable
    handler: Handler[Any, Any, Any]
    settings: LaneSettings
    order: LaneSpec


class SharedHost:
    """For all threads of this process. Every request has a connection of its own while it lasts.

    One connection, the anchor, stays as long as this process has a lane: the host ends with its last client.
    """

    def __init__(
        self, run_id: str, memory_budget: int | None, threads: int | None, model_cache: ModelCacheConfig
    ) -> None:
        self._run_id = run_id
        self._order_settings = memory_budget, threads, model_cache
        self._lock = threading.Lock()
        """Guards what follows; held while the anchor is asked, which answers at once."""
        self._anchor: Channel | None = None
        self._lanes: dict[Hashable, tuple[SharedLane, int]] = {}
        self._free: list[Channel] = []

    # What a step asks for.

    def enter(
        self, key: Hashable, make_handler: Callable[[], Handler[Any, Any, Any]], settings: LaneSettings
    ) -> SharedLane:
        with self._lock:
            lane, users = self._lanes.get(key, (None, 0))
            if lane is None:
                handler = make_handler()
                order = LaneSpec(key, pickler.dumps((handler, settings)), *self._order_settings)
                lane = SharedLane(key, handler, settings, order)
                self._tell(lane)
            self._lanes[key] = lane, users + 1
            return lane

    def leave(self, lane: SharedLane) -> None:
        with self._lock:
            _, users = self._lanes[lane.key]
            if users > 1:
                self._lanes[lane.key] = lane, users - 1
                return
            del self._lanes[lane.key]
            try:
                if self._anchor is not None:
                    request(self._anchor, "leave", lane.key)
            except ConnectionClosed:
                self._anchor = None  # It is dead, and nobody is there to clear up after it.
            if not self._lanes:
                self._disconnect()

    def open(self, step: Any = None) -> SharedHostSession:
        return SharedHostSession(self)

    def load(self, lane: SharedLane) -> None:
        self._ask("load", lane.key)

    def load_ahead(self, lane: SharedLane, instead_of: SharedLane | None = None) -> Ahead:
        return self._ask("load_ahead", lane.key, None if instead_of is None else instead_of.key)

    def take_over(self, old: SharedLane, new: SharedLane) -> None:
        self._ask("take_over", old.key, new.key)

    def take_load_stats(self, lanes: list[SharedLane]) -> list[list[LoadStats]]:
        return self._ask("take_load_stats", [lane.key for lane in lanes])

    def lane(self, key: Hashable) -> SharedLane | None:
        with self._lock:
            lane, _ = self._lanes.get(key, (None, 0))
            return lane

    # Connections, for sessions too.

    def channel(self) -> Channel:
        """One that nobody else uses; to be given back where it is still good."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._connected()

    def give_back(self, channel: Channel) -> None:
        with self._lock:
            if self._lanes and len(self._free) < _MOST_FREE:
                self._free.append(channel)
                return
        channel.close()

    def revive(self) -> None:
        """After a connection broke: see to it that there is a host, and that it knows the lanes of this process."""
        with self._lock:
            for channel in self._free:
                channel.close()
            self._free = []
            anchor, self._anchor = self._anchor, None
            if anchor is not None:
                try:
                    request(anchor, "ping", timeout=_ANSWER_S)
                    self._anchor = anchor
                    return
                except (ConnectionClosed, TimeoutError):
                    anchor.close()
            self._tell()

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Of whichever host there is; these may be asked twice without harm."""
        deaths = 0
        while True:
            channel = self.channel()
            try:
                answer = request(channel, name, *arguments)
            except (ConnectionClosed, UnknownLane) as error:
                channel.close()
                deaths += isinstance(error, ConnectionClosed)
                if deaths > MOST_DEATHS:
                    raise self.died(deaths) from error
                self.revive()
            except BaseException:
                self.give_back(channel)
                raise
            else:
                self.give_back(channel)
                return answer

    def died(self, times: int) -> HostUnavailable:
        words = last_words(self._run_id)
        return HostUnavailable(
            f"The model host ended {times} times before it had answered anything. The system ends processes that take "
            "too much memory; or the model's own code crashes, on loading or on one of these examples, which "
            "with_exception_handling(use_subprocess=True) finds." + (f" It wrote:\n{words}" if words else "")
        )

    def _tell(self, *new: SharedLane) -> None:
        """Of new lanes; and a host that is another one than before of all lanes of this process."""
        deaths = 0
        while True:
            before = self._anchor
            anchor = self._anchor = before or self._connected()
            known = () if before else tuple(lane for lane, _ in self._lanes.values())
            try:
                for lane in (*known, *new):
                    request(anchor, "enter", lane.order)
                return
            except ConnectionClosed as error:
                self._anchor = None
                deaths += 1
                if deaths > MOST_DEATHS:
                    raise self.died(deaths) from error
            except BaseException:
                if before is None:  # It keeps the host alive, which does not know all that it should.
                    anchor.close()
                    self._anchor = None
                raise

    def _connected(self) -> Channel:
        name = f"{serve_client.__module__}:{serve_client.__name__}"
        return connect(self._run_id, name, timeout=_START_S, environment=_environment())

    def _disconnect(self) -> None:
        for channel in self._free:
            channel.close()
        if self._anchor is None:
            HostFolder(self._run_id).remove_if_dead(_END_S)
        else:
            self._anchor.close()
        self._free, self._anchor = [], None


def _environment() -> dict[str, str]:
    """The host has the whole machine, not this worker's share of it. Which devices it sees does not change."""
    share, cores = WorkerShare.current(), usable_cores()
    if not share.pool:
        return dict.fromkeys(variables_set_here(), str(cores))
    whole = WorkerShare("models", float(cores), machine_ram_bytes(), share.devices, 1)
    return {**whole.to_environment(), **dict.fromkeys(THREAD_VARIABLES, str(cores))}


_hosts_lock = threading.Lock()
_hosts: dict[tuple[int, str], SharedHost] = {}


def shared_host_of(
    run_id: str, memory_budget: int | None, threads: int | None, model_cache: ModelCacheConfig
) -> SharedHost:
    """This process's contact with the host of a run. A forked process has one of its own."""
    with _hosts_lock:
        key = os.getpid(), run_id
        for old in [each for each in _hosts if each[0] != os.getpid()]:
            del _hosts[old]
        host = _hosts.get(key)
        if host is None:
            host = _hosts[key] = SharedHost(run_id, memory_budget, threads, model_cache)
        return host
