"""The copies of one model in this process: loaded once, whoever asks first."""

from __future__ import annotations

import resource
import threading
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from apache_beam.utils import multi_process_shared

from luminosity.inference.handler import Handler

__all__ = ["Clock", "LoadStats", "LoadedModels"]


class Clock(Protocol):
    def time_ns(self) -> int: ...


@dataclass(frozen=True)
class LoadStats:
    milli_secs: int
    num_bytes: int


class LoadedModels:
    """Loads on first use, and gives out the copies in turn.

    A handler that shares its model across processes gets it through Beam's shared process space.
    """

    def __init__(self, handler: Handler[Any, Any, Any], clock: Clock, tag: str) -> None:
        self._handler = handler
        self._clock = clock
        self._tag = tag
        self._shared = handler.share_model_across_processes()
        self.copies = handler.model_copies() if self._shared else 1
        self.concurrency = max(handler.concurrency, self.copies)
        self.slots = threading.Semaphore(self.concurrency)
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._models: list[Any] = []
        self._shares: list[Any] = []
        self._turn = 0
        self._unreported: list[LoadStats] = []

    @property
    def is_loaded(self) -> bool:
        return bool(self._models)

    def load(self) -> list[Any]:
        """All copies; one thread loads them, and any other waits for it."""
        with self._loading:
            if not self._models:
                shares = [self._share(number) for number in range(self.copies)] if self._shared else []
                models = [share.acquire() for share in shares] or [self._load()]
                with self._lock:
                    self._models, self._shares = models, shares
            return list(self._models)

    def next(self) -> Any:
        models = self.load()
        with self._lock:
            self._turn = (self._turn + 1) % len(models)
            return models[self._turn]

    def retire(self, grace: float) -> None:
        """Let the next use load anew. Who computes with the old copies keeps them, for twice ``grace`` at the most."""
        with self._lock:
            models, shares, self._models, self._shares = self._models, self._shares, [], []
            self._tag = uuid.uuid4().hex
        for model in models:
            self._handler.abandon(model)
        if shares:
            timer = threading.Timer(2 * grace, lambda: [share.unsafe_hard_delete() for share in shares])
            timer.daemon = True
            timer.start()

    def release(self) -> None:
        """Nobody here needs the model any more."""
        with self._lock:
            for share, model in zip(self._shares, self._models, strict=False):
                share.release(model)
            self._models, self._shares = [], []

    def take_load_stats(self) -> list[LoadStats]:
        """Loads since last asked, so that each is counted once."""
        with self._lock:
            stats, self._unreported = self._unreported, []
            return stats

    def _share(self, number: int) -> Any:
        return multi_process_shared.MultiProcessShared(self._load, tag=f"{self._tag}{number}", always_proxy=True)

    def _load(self) -> Any:
        begun, before = self._clock.time_ns(), _peak_memory_bytes()
        model = self._handler.load_model()
        self._handler.warm_up(model)
        taken = self._handler.memory(model)
        stats = LoadStats(
            (self._clock.time_ns() - begun) // 1_000_000, _peak_memory_bytes() - before if taken is None else taken
        )
        with self._lock:
            self._unreported.append(stats)
        return model


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
