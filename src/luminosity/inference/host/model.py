"""One model of a host: whether it is there, who uses it, what it takes."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from luminosity.inference.handler import Handler

__all__ = ["Clock", "Family", "LoadStats", "Loaded", "Model", "State"]


class Clock(Protocol):
    def time_ns(self) -> int: ...


@dataclass(frozen=True)
class LoadStats:
    milli_secs: int
    num_bytes: int


@dataclass
class Loaded:
    """What a load gave: as many copies as were asked for, and what they take together."""

    copies: tuple[Any, ...]
    size: int
    seconds: float
    stats: LoadStats
    is_estimate: bool = False
    """Whether only the growth of the process tells the size."""

    def let_go(self) -> tuple[tuple[Any, ...], int]:
        """The copies, to be dropped by the caller, and their size; who still has this object keeps none of them."""
        copies, self.copies = self.copies, ()
        return copies, self.size


@dataclass(frozen=True)
class Family:
    """Models of which only so many may be there at once, as `max_models_per_worker_hint` says."""

    name: Hashable
    most: int


class State(Enum):
    ABSENT = auto()
    LOADING = auto()
    READY = auto()


class Model:
    """Guarded by the host's lock; the copies themselves are used outside it, by who is counted as a user."""

    def __init__(self, key: Hashable, handler: Handler[Any, Any, Any], clock: Clock, family: Family | None) -> None:
        self.key = key
        self.label = str(handler)
        """What messages call it."""
        self.handler = handler
        self.clock = clock
        self.family = family
        self.copies_wanted = handler.model_copies() if handler.share_model_across_processes() else 1
        self.concurrency = max(handler.concurrency, self.copies_wanted)
        self.slots = threading.Semaphore(self.concurrency)
        self.state = State.ABSENT
        self.size: int | None = None
        """In bytes; known once it was loaded."""
        self.is_measured_again = False
        """Its size was in doubt, and the second time counts."""
        self.users = 0
        """Batches that have been cut for it and are not yet done."""
        self.used_at = 0.0
        self.arrived_at = 0.0
        self.run_seconds = 0.0
        """How long it has computed since it was loaded."""
        self.load_seconds = 0.0
        self.load_begun = 0.0
        self.absent_since = 0.0
        self.is_leaving = False
        """It gets no more batches, so that another model finds room."""
        self.waiters = 0
        """Who waits for it to be loaded, and for nothing else."""
        self.is_awaited = False
        """Somebody wants it loaded before there is work for it, and goes on meanwhile."""
        self.attempt = 0
        """Which load is under way, or was the last: one that was given up must not count when it ends after all."""
        self.is_overdue = False
        """Its load takes longer than somebody has time for; it goes on, and holds up no other model's."""
        self.failures = 0
        self.error: BaseException | None = None
        """Why the last load failed."""
        self.failed_at = 0.0
        self.does_not_fit_beside = False
        """It was loaded ahead of its work, and there was no room for it beside the others."""
        self._copies: tuple[Any, ...] = ()
        self._turn = 0
        self._unreported: list[LoadStats] = []

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY

    def begin(self, now: float) -> int:
        self.state, self.load_begun, self.is_overdue, self.is_awaited = State.LOADING, now, False, False
        self.attempt += 1
        return self.attempt

    def arrived(self, loaded: Loaded, now: float) -> None:
        self.state, self._copies, self.error = State.READY, loaded.copies, None
        self.used_at, self.arrived_at = now, now
        self.run_seconds, self.load_seconds = 0.0, loaded.seconds

    def count_load(self, stats: LoadStats) -> None:
        self._unreported.append(stats)

    def go(self, now: float) -> tuple[Any, ...]:
        """It is not here any more; the caller lets go of the copies, outside the lock."""
        copies, self._copies = self._copies, ()
        self.state, self.absent_since, self.is_leaving, self.is_overdue = State.ABSENT, now, False, False
        return copies

    def next_copy(self) -> tuple[Any] | None:
        """The copy whose turn it is; None where it was taken away under its user, because a batch hung."""
        copies = self._copies
        if not copies:
            return None
        self._turn = (self._turn + 1) % len(copies)
        return (copies[self._turn],)

    def take_load_stats(self) -> list[LoadStats]:
        """Loads since last asked, so that each is counted once."""
        stats, self._unreported = self._unreported, []
        return stats
