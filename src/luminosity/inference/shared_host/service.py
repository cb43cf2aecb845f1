"""The shared host's side: answers the requests of workers with the model hosts of this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from apache_beam.internal import pickler

from luminosity._shared.hangs import Wait
from luminosity.inference.files.local import use_cache
from luminosity.inference.host.host import ModelHost, host_of
from luminosity.inference.host.interface import Ahead, BatchStats, LoadStats, Outcome
from luminosity.inference.host.lane import Lane
from luminosity.inference.host.session import Session
from luminosity.inference.ipc.channel import Channel
from luminosity.inference.ipc.pickling import PortableError
from luminosity.inference.shared_host.connections import LaneSpec, UnknownLane, respond
from luminosity.inference.threads import limit_threads

__all__ = ["serve_client"]


@dataclass(eq=False)
class _Entry:
    """A lane and the host that it belongs to."""

    host: ModelHost
    lane: Lane


_lock = threading.Lock()
"""Protects ``_entries``, and makes entering and leaving a lane one step with its change here."""
_entries: dict[Hashable, _Entry] = {}


def serve_client(channel: Channel) -> None:
    """Answer one client's requests, one after another, until it disconnects. Each client has its own thread."""
    service = _ClientService()
    try:
        while True:
            respond(channel, service)
    finally:
        service.end()


class _ClientService:
    """Serves one client, who has authenticated itself and may call every public method by name."""

    def __init__(self) -> None:
        self._entered: list[_Entry] = []
        self._sessions: dict[ModelHost, Session] = {}
        self._finishing: Iterator[list[Outcome]] | None = None

    def ping(self) -> None:
        """Do nothing; the response shows that this process is alive."""

    def describe_wait(self, keys: list[Hashable]) -> Wait:
        """Return how the models of these lanes do, for a bundle of another connection that waits for them."""
        entries = [_entry(key) for key in keys]
        hosts = dict.fromkeys(entry.host for entry in entries)
        waits = [host.describe_wait([entry.lane for entry in entries if entry.host is host]) for host in hosts]
        # The bundle waits for all of them: it goes on as long as one does.
        return replace(min(waits, key=lambda wait: (not wait.is_loading, wait.quiet_seconds)), pid=os.getpid())

    def enter(self, spec: LaneSpec) -> None:
        """Enter a lane, which the first client creates."""
        limit_threads(spec.threads)
        use_cache(spec.model_cache)
        spec.run.use()
        handler, settings = pickler.loads(spec.pickled)
        handler.set_environment_vars()
        host = host_of(handler, spec.memory_budget)
        with _lock:
            entry = _Entry(host, host.enter(spec.key, lambda: handler, settings))
            _entries[spec.key] = entry
        self._entered.append(entry)

    def leave(self, key: Hashable) -> None:
        """Leave a lane."""
        entry = next(entry for entry in self._entered if entry.lane.key == key)
        self._entered.remove(entry)
        _leave(entry)

    def load(self, key: Hashable) -> None:
        """Block until the lane's model is in memory; raise the error of its load."""
        entry = _entry(key)
        entry.host.load(entry.lane)

    def load_ahead(self, key: Hashable, instead_of: Hashable) -> Ahead:
        """Request a model before there is work for it, and return how far its load is."""
        entry = _entry(key)
        return entry.host.load_ahead(entry.lane, None if instead_of is None else _entry(instead_of).lane)

    def take_over(self, old: Hashable, new: Hashable) -> None:
        """Move the examples of a lane that are not yet cut into batches to another lane."""
        entry = _entry(old)
        entry.host.take_over(entry.lane, _entry(new).lane)

    def take_load_stats(self, keys: list[Hashable]) -> list[list[LoadStats]]:
        """Return, for each lane, the loads of its model since the last call."""
        entries = [_entry(key) for key in keys]
        return [stats for entry in entries for stats in entry.host.take_load_stats([entry.lane])]

    def submit(self, key: Hashable, number: int, prepared: Any, costs: Any, weights: Any) -> list[Outcome]:
        """Add a block to a lane and return the outcomes that have arrived; ``number`` comes back as their tag."""
        entry = _entry(key)
        session = self._sessions.get(entry.host)
        if session is None:
            session = self._sessions[entry.host] = entry.host.open()
        session.submit(entry.lane, prepared, costs, number, weights)
        return [_portable(outcome) for each in self._sessions.values() for outcome in each.ready()]

    def more(self) -> tuple[list[Outcome], bool]:
        """Block until there are outcomes; return them, and whether there are no more."""
        if not self._finishing:
            self._finishing = self._rest()
        for outcomes in self._finishing:
            if outcomes:
                return [_portable(outcome) for outcome in outcomes], False
        return [], True

    def close(self) -> dict[Hashable, list[BatchStats]]:
        """Close the client's sessions and return the statistics of their batches, by the lane's key."""
        stats: dict[Hashable, list[BatchStats]] = {}
        for session in self._sessions.values():
            for lane, batches in session.take_stats().items():
                stats.setdefault(lane.key, []).extend(batches)
            session.close()
        self._sessions, self._finishing = {}, None
        return stats

    def end(self) -> None:
        """Close the sessions and leave all lanes: the client has disconnected."""
        self.close()
        for entry in self._entered:
            _leave(entry)

    def _rest(self) -> Iterator[list[Outcome]]:
        for session in self._sessions.values():
            yield from session.finish()


def _leave(entry: _Entry) -> None:
    """Leave a lane, and forget its key after the last client: versions come and go while this process lives."""
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
    return replace(outcome, error=PortableError(outcome.error))
