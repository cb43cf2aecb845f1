"""One model of a host: its state, its use, and the background threads that load and drop it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from luminosity.core import resident_bytes
from luminosity.inference.continuous import ContinuousModel
from luminosity.inference.handler import Handler
from luminosity.inference.host.interface import Clock, Family, LoadStats
from luminosity.inference.memory import forget_frames, is_out_of_memory, model_bytes, release_memory

__all__ = [
    "Dropped",
    "LoadCallbacks",
    "Loaded",
    "Model",
    "State",
    "drop",
    "drop_in_background",
    "start_load",
]


@dataclass
class Loaded:
    """The result of a load: the copies of a model, and the bytes that they take together."""

    copies: tuple[Any, ...]
    size: int
    seconds: float
    stats: LoadStats
    is_estimate: bool = False
    """Whether the size is only estimated from how much the process has grown."""

    def release(self) -> tuple[tuple[Any, ...], int]:
        """Return the copies, for the caller to drop, and their size; this object no longer refers to them."""
        copies, self.copies = self.copies, ()
        return copies, self.size


class State(Enum):
    """Whether a model is in memory."""

    ABSENT = auto()
    LOADING = auto()
    READY = auto()


class Model:
    """A model and its copies in memory.

    The host's lock protects every attribute. A device thread uses a copy without the lock, while ``users`` counts its
    batch.
    """

    def __init__(self, key: Hashable, handler: Handler[Any, Any, Any], clock: Clock, family: Family | None) -> None:
        self.key = key
        self.label = str(handler)
        """The model's name in messages."""
        self.handler = handler
        self.clock = clock
        self.family = family
        self.copies_wanted = handler.model_copies() if handler.share_model_across_processes() else 1
        self.concurrency = max(handler.concurrency, self.copies_wanted)
        self.slots = threading.Semaphore(self.concurrency)
        """One for each batch that may compute at once."""
        self.state = State.ABSENT
        self.size: int | None = None
        """Bytes; known after the first load."""
        self.is_measured_again = False
        """Whether the model is loaded a second time because its first measured size was implausible."""
        self.users = 0
        """Batches that were cut for this model and are not yet done."""
        self.used_at = 0.0
        self.arrived_at = 0.0
        self.run_seconds = 0.0
        """How long the model has computed since it was loaded."""
        self.load_seconds = 0.0
        self.load_begun = 0.0
        self.absent_since = 0.0
        self.is_leaving = False
        """Whether the model gets no more batches, so that another model finds room."""
        self.waiters = 0
        """Threads that wait only for the model to be loaded."""
        self.is_awaited = False
        """Whether a step asked for the model before there is work for it, and does not wait."""
        self.attempt = 0
        """The number of the current or last load; the result of an earlier load is ignored."""
        self.is_overdue = False
        """Whether the load takes longer than a timeout; it goes on, and other models may be loaded meanwhile."""
        self.failures = 0
        self.error: BaseException | None = None
        """The error of the last load."""
        self.failed_at = 0.0
        self.does_not_fit_beside = False
        """Whether the model was requested ahead of its work and found no room beside the others."""
        self._copies: tuple[Any, ...] = ()
        self._turn = 0
        self._unreported: list[LoadStats] = []

    @property
    def is_ready(self) -> bool:
        """Whether the model is in memory and can compute."""
        return self.state is State.READY

    @property
    def is_continuous(self) -> bool:
        """Whether the model takes examples as they come; False while it is absent."""
        return bool(self._copies) and isinstance(self._copies[0], ContinuousModel)

    @property
    def capacity(self) -> int:
        """How many examples a model that takes them as they come wants at once."""
        return max(sum(copy.capacity for copy in self._copies), 1)

    def begin_load(self, now: float) -> int:
        """Note that a load begins, and return its number."""
        self.state, self.load_begun, self.is_overdue, self.is_awaited = State.LOADING, now, False, False
        self.attempt += 1
        return self.attempt

    def arrived(self, loaded: Loaded, now: float) -> None:
        """Take the copies of a finished load."""
        self.state, self._copies, self.error = State.READY, loaded.copies, None
        self.used_at, self.arrived_at = now, now
        self.run_seconds, self.load_seconds = 0.0, loaded.seconds

    def count_load(self, stats: LoadStats) -> None:
        """Keep the statistics of a load until they are reported."""
        self._unreported.append(stats)

    def unload(self, now: float) -> tuple[Any, ...]:
        """Become absent and return the copies; the caller drops them without holding the lock."""
        copies, self._copies = self._copies, ()
        self.state, self.absent_since, self.is_leaving, self.is_overdue = State.ABSENT, now, False, False
        return copies

    def next_copy(self) -> tuple[Any] | None:
        """Return the copies in turn; None if the model was unloaded because a batch hung."""
        copies = self._copies
        if not copies:
            return None
        self._turn = (self._turn + 1) % len(copies)
        return (copies[self._turn],)

    def take_load_stats(self) -> list[LoadStats]:
        """Return the loads since the last call, so that each is counted once."""
        stats, self._unreported = self._unreported, []
        return stats


_WORTH_RELEASING = 1_000_000  # bytes; libraries hold no more than this of a smaller model in reserve
_WORTH_COLLECTING = 256_000_000  # bytes; a garbage collection takes 0.1 s, which a model of this size is worth
Dropped: TypeAlias = "list[tuple[tuple[Any, ...], int]]"
"""Copies of models to be dropped, with the bytes they take. It must be the only reference to them."""


@dataclass(frozen=True)
class LoadCallbacks:
    """The functions that a load calls, from its own thread and without holding the lock."""

    evict_one_idle: Callable[[], Dropped]
    """Evicts a model without work if there is one, to free memory for the load."""
    loaded: Callable[[Model, int, Loaded], None]
    """Takes the result of a load: the model, the number of the attempt, the copies."""
    failed: Callable[[Model, int, BaseException], None]
    """Takes the error of a load."""


def start_load(model: Model, attempt: int, evicted: Dropped, calls: LoadCallbacks) -> None:
    """Load the model in a new thread, which first drops the evicted models so that there is room."""

    def run() -> None:
        try:
            drop(evicted)
            loaded = _load_or_make_room(model, calls.evict_one_idle)
        except BaseException as error:
            forget_frames(error)  # They hold what was loaded so far, and the model keeps the error.
            calls.failed(model, attempt, error)
        else:
            calls.loaded(model, attempt, loaded)

    threading.Thread(target=run, name="model-host-load", daemon=True).start()


def drop(dropped: Dropped) -> None:
    """Drop models and release their memory. Never hold a lock: this may end a process or close files."""
    size = sum(size for _, size in dropped)
    for copies, _ in dropped:
        _close(copies)
    references = [_weak_reference(copy) for copies, _ in dropped for copy in copies]
    dropped.clear()
    # A garbage collection takes longer than loading a small model; most models are freed without one.
    is_left = any(reference() is not None for reference in references)
    if size >= _WORTH_RELEASING:
        release_memory(collect=is_left or size >= _WORTH_COLLECTING)


def drop_in_background(dropped: Dropped) -> None:
    """Drop models in a new thread; the caller may hold the lock."""
    if dropped:
        threading.Thread(target=drop, args=(dropped,), name="model-host-drop", daemon=True).start()


def load(handler: Handler[Any, Any, Any], copies: int, clock: Clock) -> Loaded:
    """Load all copies of a model, warm them up and measure them."""
    begun, begun_ns, before = time.monotonic(), clock.time_ns(), resident_bytes()
    loaded: list[Any] = []
    known: list[int | None] = []
    try:
        for _ in range(copies):
            loaded.append(handler.load_model())
            handler.warm_up(loaded[-1])
            known.append(model_bytes(handler, loaded[-1]))
    except BaseException:
        _close(loaded)
        raise
    grown = max(resident_bytes() - before, 0)
    size = grown if None in known else sum(each or 0 for each in known)
    stats = LoadStats((clock.time_ns() - begun_ns) // 1_000_000, size, copies)
    return Loaded(tuple(loaded), size, time.monotonic() - begun, stats, is_estimate=None in known)


def _close(copies: Sequence[Any]) -> None:
    """Close the models that have threads of their own; their unfinished examples are cancelled."""
    for copy in copies:
        if isinstance(copy, ContinuousModel):
            copy.close()


def _weak_reference(model: Any) -> Callable[[], Any]:
    """Return a weak reference; an object that takes none counts as alive."""
    try:
        return weakref.ref(model)
    except TypeError:
        return lambda: True


def _load_or_make_room(model: Model, evict_one_idle: Callable[[], Dropped]) -> Loaded:
    while True:
        try:
            return load(model.handler, model.copies_wanted, model.clock)
        except BaseException as error:
            # The device holds more than models: memory of batches, and of other processes.
            if not is_out_of_memory(error):
                raise
            idle = evict_one_idle()
            if not idle:
                raise
        drop(idle)
