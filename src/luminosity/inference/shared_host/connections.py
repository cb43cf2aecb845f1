"""Requests to the shared host of a run, and a worker's connections to it; the host may die and be replaced any time."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from luminosity._shared.hangs import Wait, ask_for_stacks, is_stopped, read_stacks
from luminosity.core import THREAD_VARIABLES, WorkerShare, machine_ram_bytes, usable_cores
from luminosity.errors import Fix, HostUnavailable, InvalidType
from luminosity.inference.ipc.channel import Channel, ConnectionClosed
from luminosity.inference.ipc.client import connect, last_output
from luminosity.inference.ipc.folder import HostFolder
from luminosity.inference.ipc.pickling import pack_error, unpack_error
from luminosity.inference.options import ModelCacheConfig
from luminosity.inference.run_settings import RunSettings
from luminosity.inference.threads import variables_set_here

__all__ = ["MOST_DEATHS", "HostConnections", "LaneSpec", "UnknownLane", "request", "respond"]


class UnknownLane(LookupError):
    """The shared host does not know a lane: it was started after a worker had entered that lane."""


@dataclass(frozen=True)
class LaneSpec:
    """All that the shared host must know to create a lane."""

    key: Hashable
    pickled: bytes
    """The handler and its ``LaneSettings``."""
    memory_budget: int | None
    threads: int | None
    model_cache: ModelCacheConfig
    run: RunSettings = field(default_factory=RunSettings)


def request(channel: Channel, name: str, *arguments: Any, timeout: float | None = None) -> Any:
    """Send a request and return the response; raise the error that was raised in the shared host.

    Raises ``ConnectionClosed`` if the shared host dies meanwhile, ``TimeoutError`` after ``timeout`` seconds.
    """
    channel.send((name, *arguments))
    value, error = channel.recv(timeout)
    if error is not None:
        raise unpack_error(error)
    return value


def respond(channel: Channel, service: Any) -> None:
    """Receive the next request, call the public method of ``service`` that it names, and send its value or error.

    A request that can't be unpickled and a value that can't be pickled are sent as errors, too. Raises
    ``ConnectionClosed`` when the client has disconnected.
    """
    try:
        name, *arguments = channel.recv()
        if name.startswith("_"):
            raise LookupError(f"found the request {name!r}, expected the name of a public method")
        _send(channel, getattr(service, name)(*arguments))
    except ConnectionClosed:
        raise
    except BaseException as error:
        channel.send((None, pack_error(error)))


def _send(channel: Channel, value: Any) -> None:
    try:
        channel.send((value, None))
    except ConnectionClosed:
        raise
    except Exception as error:
        raise InvalidType(
            f"found a prediction that can't be sent to another process: {error}",
            fix="return picklable predictions, or leave out large_model=True, so that each worker loads the model",
        ) from error


MOST_DEATHS = 5  # hosts in a row that die before they respond; more is no accident
_SERVICE = "luminosity.inference.shared_host.service:serve_client"
_START_S = 120.0  # the host imports the pipeline's libraries before it accepts connections
_PING_S = 30.0  # a host that does not respond to a ping within this time counts as dead
_EXIT_S = 2.0  # how long the system may take to end a process whose connections are already closed
_DESCRIBE_S = 1.5  # to connect, and again to answer: a host answers at once, unless native code holds its interpreter
_STACKS_S = 0.2  # for a process to write its stacks
_MOST_FREE = 16  # idle connections to keep; each has a thread in the host


class HostConnections:
    """This process's connections to the shared host, for all its threads.

    While a request lasts, no other thread uses its connection. One more connection, the anchor, stays open as long as
    this process has a lane, because the host exits when its last client disconnects. When the host has died, the
    next one is started, and all lanes of this process are entered again.

    Methods may be called from any thread. ``_lock`` protects all attributes; it is held during requests through the
    anchor, which the host answers at once.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._lock = threading.Lock()
        self._anchor: Channel | None = None
        self._lanes: dict[Hashable, LaneSpec] = {}
        self._free: list[Channel] = []

    def enter(self, lane: LaneSpec) -> None:
        """Enter a lane, and start the host if there is none."""
        with self._lock:
            self._enter_all(lane)
            self._lanes[lane.key] = lane

    def leave(self, key: Hashable) -> None:
        """Leave a lane. After the last one, all connections are closed."""
        with self._lock:
            del self._lanes[key]
            try:
                if self._anchor is not None:
                    request(self._anchor, "leave", key)
            except ConnectionClosed:
                self._anchor = None  # The host has died, and left its folder behind.
            if not self._lanes:
                self._disconnect()

    def channel(self) -> Channel:
        """Return a connection for the caller alone, who gives it back or closes it."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._connect()

    def give_back(self, channel: Channel) -> None:
        """Take back a connection that still works."""
        with self._lock:
            if self._lanes and len(self._free) < _MOST_FREE:
                self._free.append(channel)
                return
        channel.close()

    def revive(self) -> None:
        """After a connection broke: make sure that there is a host, and that it knows the lanes of this process."""
        with self._lock:
            for channel in self._free:
                channel.close()
            self._free = []
            anchor, self._anchor = self._anchor, None
            if anchor is not None:
                try:
                    request(anchor, "ping", timeout=_PING_S)
                    self._anchor = anchor
                    return
                except (ConnectionClosed, TimeoutError):
                    anchor.close()
            self._enter_all()

    def request(self, name: str, *arguments: Any) -> Any:
        """Send a request and return the response; send it again if the host dies, so it must be repeatable."""
        deaths = 0
        while True:
            channel = self.channel()
            try:
                response = request(channel, name, *arguments)
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
                return response

    def describe_wait(self, channel: Channel, keys: list[Hashable], seconds: float) -> Wait:
        """Return how the host does, for which a request through ``channel`` has waited for ``seconds``. Any thread.

        Takes a few seconds if the host does not answer.
        """
        pid = channel.peer_pid()
        unknown = Wait("the shared model host", seconds, pid=pid, state="does not answer")
        if is_stopped(pid):
            return replace(unknown, state="stopped")
        try:
            with connect(self._run_id, _SERVICE, timeout=_DESCRIBE_S, environment=_environment()) as other:
                return request(other, "describe_wait", keys, timeout=_DESCRIBE_S)
        except (ConnectionError, HostUnavailable, TimeoutError, UnknownLane):
            begin = ask_for_stacks(pid)
            if begin is None:
                return unknown
            time.sleep(_STACKS_S)
            return replace(unknown, stack=read_stacks(pid, begin))

    def died(self, times: int) -> HostUnavailable:
        """Return the error to raise when the host has died too often."""
        output = last_output(self._run_id)
        advice = "with_exception_handling(use_subprocess=True) finds the example that crashes the model"
        return HostUnavailable(
            f"the shared model host died {times} times before it responded: either the system killed it because it "
            "took too much memory, or the model's own code crashes, on loading or on one of these examples"
            + (f"; its last output:\n{output}" if output else ""),
            fix=Fix(advice),
        )

    def _enter_all(self, *new: LaneSpec) -> None:
        """Enter the new lanes, and in a new host all lanes of this process. The caller holds the lock."""
        deaths = 0
        while True:
            before = self._anchor
            anchor = self._anchor = before or self._connect()
            known = () if before else tuple(self._lanes.values())
            try:
                for lane in (*known, *new):
                    request(anchor, "enter", lane)
                return
            except ConnectionClosed as error:
                self._anchor = None
                deaths += 1
                if deaths > MOST_DEATHS:
                    raise self.died(deaths) from error
            except BaseException:
                if before is None:  # Close it: an open anchor would keep a host alive that lacks some of the lanes.
                    anchor.close()
                    self._anchor = None
                raise

    def _connect(self) -> Channel:
        return connect(self._run_id, _SERVICE, timeout=_START_S, environment=_environment())

    def _disconnect(self) -> None:
        for channel in self._free:
            channel.close()
        if self._anchor is None:
            HostFolder(self._run_id).remove_if_dead(_EXIT_S)
        else:
            self._anchor.close()
        self._free, self._anchor = [], None


def _environment() -> dict[str, str]:
    """Return variables that give the host the whole machine, not this worker's share. It sees the same devices."""
    share, cores = WorkerShare.current(), usable_cores()
    if not share.pool:
        return dict.fromkeys(variables_set_here(), str(cores))
    whole = WorkerShare("models", float(cores), machine_ram_bytes(), share.devices, 1)
    return {**whole.to_environment(), **dict.fromkeys(THREAD_VARIABLES, str(cores))}
