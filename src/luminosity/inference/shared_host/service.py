"""The machine's side of the model host: what a client asks for, done with the hosts of this process."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from apache_beam.internal import pickler

from luminosity.inference.files.local import use_cache
from luminosity.inference.host.host import Ahead, ModelHost
from luminosity.inference.host.hosts import host_of
from luminosity.inference.host.lane import Lane
from luminosity.inference.host.model import LoadStats
from luminosity.inference.host.session import Session
from luminosity.inference.host.work import BatchStats, Outcome
from luminosity.inference.ipc.channel import Channel
from luminosity.inference.ipc.portable_errors import Travelling
from luminosity.inference.options import ModelCacheConfig
from luminosity.inference.shared_host.requests import UnknownLane, respond
from luminosity.inference.threads import limit_threads

__all__ = ["LaneSpec", "serve_client"]


@dataclass(frozen=True)
class LaneSpec:
    """How to make a lane: all that a host process must know of a step that uses a model."""

    key: Hashable
    pickled: bytes
    """The handler and its `LaneSettings`."""
    memory_budget: int | None
    threads: int | None
    model_cache: ModelCacheConfig


@dataclass(eq=False)
class _Entry:
    host: ModelHost
    lane: Lane


_lock = threading.Lock()
_entries: dict[Hashable, _Entry] = {}


def serve_client(channel: Channel) -> None:
    """One client's requests, one after another, until it is gone."""
    conversation = _Conversation()
    try:
        while True:
            respond(channel, conversation)
    finally:
        conversation.end()


class _Conversation:
    """The names of its public methods are what clients may ask for; `talk` is behind the authentication."""

    def __init__(self) -> None:
        self._entered: list[_Entry] = []
        self._sessions: dict[ModelHost, Session] = {}

    def ping(self) -> None:
        """Whether anybody is there."""

    def enter(self, order: LaneSpec) -> None:
        limit_threads(order.threads)
        use_cache(order.model_cache)
        handler, settings = pickler.loads(order.pickled)
        handler.set_environment_vars()
        host = host_of(handler, order.memory_budget)
        with _lock:
            entry = _Entry(host, host.enter(order.key, lambda: handler, settings))
            _entries[order.key] = entry
        self._entered.append(entry)

    def leave(self, key: Hashable) -> None:
        entry = next(entry for entry in self._entered if entry.lane.key == key)
        self._entered.remove(entry)
        _leave(entry)

    def load(self, key: Hashable) -> None:
        entry = _entry(key)
        entry.host.load(entry.lane)

    def load_ahead(self, key: Hashable, instead_of: Hashable) -> Ahead:
        entry = _entry(key)
        return entry.host.load_ahead(entry.lane, None if instead_of is None else _entry(instead_of).lane)

    def take_over(self, old: Hashable, new: Hashable) -> None:
        entry = _entry(old)
        entry.host.take_over(entry.lane, _entry(new).lane)

    def take_load_stats(self, keys: list[Hashable]) -> list[list[LoadStats]]:
        entries = [_entry(key) for key in keys]
        return [stats for entry in entries for stats in entry.host.take_load_stats([entry.lane])]

    def submit(self, key: Hashable, number: int, prepared: Any, costs: Any, weights: Any) -> list[Outcome]:
        entry = _entry(key)
        session = self._sessions.get(entry.host)
        if session is None:
            session = self._sessions[entry.host] = entry.host.open()
        session.submit(entry.lane, prepared, costs, number, weights)
        return [_portable(outcome) for each in self._sessions.values() for outcome in each.ready()]

    def more(self) -> tuple[list[Outcome], bool]:
        """Waits for what is next; and whether it was the last."""
        if not self._finishing:
            self._finishing = self._rest()
        for outcomes in self._finishing:
            if outcomes:
                return [_portable(outcome) for outcome in outcomes], False
        return [], True

    def close(self) -> dict[Hashable, list[BatchStats]]:
        """The end of a session, and what its batches were."""
        stats: dict[Hashable, list[BatchStats]] = {}
        for session in self._sessions.values():
            for lane, batches in session.take_stats().items():
                stats.setdefault(lane.key, []).extend(batches)
            session.close()
        self._sessions, self._finishing = {}, None
        return stats

    def end(self) -> None:
        self.close()
        for entry in self._entered:
            _leave(entry)

    _finishing: Iterator[list[Outcome]] | None = None

    def _rest(self) -> Iterator[list[Outcome]]:
        for session in self._sessions.values():
            yield from session.finish()


def _leave(entry: _Entry) -> None:
    """Who is the last to leave a lane takes its name along: versions come and go as long as the host lives."""
    with _lock:
        entry.host.leave(entry.lane)
        known = _entries.get(entry.lane.key)
        if known is not None and known.lane is entry.lane and not entry.lane.users:
            del _entries[entry.lane.key]


def _entry(key: Hashable) -> _Entry:
    with _lock:
        try:
            return _entries[key]
        except KeyError:
            raise UnknownLane(key) from None


def _portable(outcome: Outcome) -> Outcome:
    if outcome.error is None:
        return outcome
    return replace(outcome, error=Travelling(outcome.error))
