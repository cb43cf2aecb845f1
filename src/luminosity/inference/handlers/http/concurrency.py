"""Lets as many requests through at once as the limit says."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from time import monotonic
from types import TracebackType

__all__ = ["AdaptiveLimit", "Gate", "Slot", "gate_of"]


_START = 4
_LEAST_SAMPLES = 16
_STEP = 1.25
_TOLERATED = 1.5
"""Latency up to this multiple of the best is no sign of a queue at the server."""
_FORGET = 1.02
"""The best latency is forgotten slowly: it may have been that of easier requests."""
_CALM_S = 5.0
_PROBE_S = 10.0
"""When to try again where more requests at once did not pay: servers scale themselves up."""


class Gate:
    """One for an endpoint, shared by all threads of the process."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self.limit = AdaptiveLimit(most, clock)
        self.under_way = 0

    def enter(self, patience_s: float = math.inf) -> Slot | None:
        """A slot, as a context; None if there was none for so long.

        With endless patience the wait is bounded as those are who hold slots: by the timeout of a request.
        """
        with self.changed:
            patience = None if patience_s == math.inf else max(0.0, patience_s)
            if not self.changed.wait_for(lambda: self.under_way < self.limit.now, patience):
                return None
            self.under_way += 1
            return Slot(self, full=self.under_way >= self.limit.now)


class Slot:
    """One request under way."""

    def __init__(self, gate: Gate, full: bool) -> None:
        self._gate = gate
        self._began = gate.clock()
        self._full = full

    def answered(self) -> None:
        with self._gate.changed:
            self._gate.limit.answered(self._began, self._full)

    def overloaded(self) -> None:
        with self._gate.changed:
            self._gate.limit.overloaded(self._began)

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._gate.changed:
            self._gate.under_way -= 1
            self._gate.changed.notify_all()


_lock = threading.Lock()
_gates: weakref.WeakValueDictionary[tuple[int, str], Gate] = weakref.WeakValueDictionary()


def gate_of(endpoint: str, most: int) -> Gate:
    """The gate of this endpoint in this process, for as long as a model there is in use.

    Handlers may differ in how many requests they allow: each keeps to its own by the number of its threads.
    """
    key = os.getpid(), endpoint
    with _lock:
        gate = _gates.get(key)
        if gate is None:
            gate = _gates[key] = Gate(most)
        with gate.changed:
            gate.limit.most = max(gate.limit.most, most)
        return gate


class AdaptiveLimit:
    """Decides; counts nothing itself, and is guarded by its caller.

    It doubles while that pays, then takes small steps. More requests at once pay as long as latency stays near the best
    seen, or throughput grows by half of what was added. If they don't, the step is taken back and tried again later.
    A server that says it has too much to do gets half as much.

    >>> limit = AdaptiveLimit(64)
    >>> limit.now
    4
    """

    def __init__(self, most: int, clock: Callable[[], float] = monotonic) -> None:
        self.most = most
        self._clock = clock
        self._limit = float(min(_START, most))
        self._doubling = True
        self._best = math.inf
        self._before: tuple[float, float] | None = None
        """Limit and latency before the last step."""
        self._hold_until = -math.inf
        self._restart()

    @property
    def now(self) -> int:
        return int(self._limit)

    def answered(self, began: float, full: bool) -> None:
        """A request that began then is done; `full`: so many were under way that another one had to wait."""
        if not full or began < self._since:
            return  # It tells nothing of the present limit.
        self._seconds += self._clock() - began
        self._count += 1
        if self._count >= max(_LEAST_SAMPLES, self._limit):
            self._judge(self._seconds / self._count)

    def overloaded(self, began: float) -> None:
        """The server refused a request that began then, or did not answer; one refusal of those at once counts."""
        if began < self._since:
            return
        self._limit = max(1.0, self._limit / 2)
        self._hold(_CALM_S)
        self._restart()

    def _judge(self, latency: float) -> None:
        self._best = min(latency, self._best * _FORGET)
        before, self._before = self._before, None
        if before is not None and latency > _TOLERATED * self._best and not self._paid(*before, latency):
            self._limit = before[0]
            self._hold(_PROBE_S)
        elif self._clock() >= self._hold_until and self._limit < self.most:
            self._before = self._limit, latency
            step = self._limit * (2 if self._doubling else _STEP)
            self._limit = min(float(self.most), max(step, self._limit + 1))
        self._restart()

    def _paid(self, limit: float, latency: float, latency_now: float) -> bool:
        """Requests under way, divided by how long each takes, are the throughput."""
        added = self._limit / limit - 1
        return (self._limit / latency_now) / (limit / latency) >= 1 + added / 2

    def _hold(self, seconds: float) -> None:
        self._doubling = False
        self._before = None
        self._hold_until = self._clock() + seconds

    def _restart(self) -> None:
        self._since = self._clock()
        self._seconds, self._count = 0.0, 0
