"""Loads and drops models in background threads, without holding any lock."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from luminosity.core import resident_bytes
from luminosity.inference.handler import Handler
from luminosity.inference.host.model import Clock, Loaded, LoadStats, Model
from luminosity.inference.memory import forget_frames, is_out_of_memory, model_bytes, release_memory

__all__ = ["Dropped", "LoadCallbacks", "drop", "drop_in_background", "load", "start_load"]

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
    for _ in range(copies):
        model = handler.load_model()
        handler.warm_up(model)
        loaded.append(model)
        known.append(model_bytes(handler, model))
    grown = max(resident_bytes() - before, 0)
    size = grown if None in known else sum(each or 0 for each in known)
    stats = LoadStats((clock.time_ns() - begun_ns) // 1_000_000, size, copies)
    return Loaded(tuple(loaded), size, time.monotonic() - begun, stats, is_estimate=None in known)


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
