"""Loads models on threads of their own, so that no lock is held and no batch waits that need not."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from luminosity.inference.handler import Handler
from luminosity.inference.host.model import Clock, Loaded, LoadStats, Model
from luminosity.inference.memory import forget_frames, is_out_of_memory, model_bytes, release_memory, resident_bytes

if TYPE_CHECKING:
    from luminosity.inference.host.host import ModelHost

__all__ = ["Dropped", "drop", "load", "start"]

_WORTH_LOOKING = 1_000_000
_WORTH_COLLECTING = 256_000_000
Dropped: TypeAlias = "list[tuple[tuple[Any, ...], int]]"
"""Copies of models that nobody uses any more, with what they take."""


def start(host: ModelHost, model: Model, attempt: int, dropped: Dropped) -> None:
    """Load this model; before that let go of copies of others, so that there is room."""

    def run() -> None:
        try:
            drop(dropped)
            loaded = _load_or_make_room(host, model)
        except BaseException as error:
            forget_frames(error)  # They hold what was loaded so far, and the error is kept.
            host.load_failed(model, attempt, error)
        else:
            host.loaded(model, attempt, loaded)

    threading.Thread(target=run, name="model-host-load", daemon=True).start()


def drop(dropped: Dropped) -> None:
    """Outside any lock: the last reference to a model may end a process or close files."""
    size = sum(size for _, size in dropped)
    traces = [_trace(copy) for copies, _ in dropped for copy in copies]
    dropped.clear()
    # Collecting takes a tenth of a second, more than the load of a small model; most models are gone without it.
    is_left = any(trace() is not None for trace in traces)
    if size >= _WORTH_LOOKING:
        release_memory(collect=is_left or size >= _WORTH_COLLECTING)


def _trace(model: Any) -> Callable[[], Any]:
    """Tells whether it is still there; of what takes no weak reference, nobody knows."""
    try:
        return weakref.ref(model)
    except TypeError:
        return lambda: True


def load(handler: Handler[Any, Any, Any], copies: int, clock: Clock) -> Loaded:
    """All copies, warmed up and measured."""
    begun, begun_ns, before = time.monotonic(), clock.time_ns(), resident_bytes()
    loaded: list[Any] = []
    told: list[int | None] = []
    for _ in range(copies):
        model = handler.load_model()
        handler.warm_up(model)
        loaded.append(model)
        told.append(model_bytes(handler, model))
    grown = max(resident_bytes() - before, 0)
    size = grown if None in told else sum(each or 0 for each in told)
    stats = LoadStats((clock.time_ns() - begun_ns) // 1_000_000, size)
    return Loaded(tuple(loaded), size, time.monotonic() - begun, stats, is_estimate=None in told)


def _load_or_make_room(host: ModelHost, model: Model) -> Loaded:
    while True:
        try:
            return load(model.handler, model.copies_wanted, model.clock)
        except BaseException as error:
            # The device may hold more than models: what batches need, and other processes.
            if not is_out_of_memory(error):
                raise
            idle = host.evict_one_idle()
            if not idle:
                raise
        drop(idle)
