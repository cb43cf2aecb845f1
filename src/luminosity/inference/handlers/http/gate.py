"""How many requests a process sends to a server at once: a gate for each endpoint, whose width is found by trying."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from time import monotonic
from types import TracebackType

__all__ = ["AdaptiveLimit", "Gate", "Permit", "shared_gate"]

_START = 4
_LEAST_SAMPLES = 16  # requests before a limit is judged
_STEP = 1.25  # growth once doubling has stopped
_TOLERATED = 1.5  # latency up to this multiple of the best is no sign of a queue at the server
_FORGET = 1.02  # the best latency grows by this factor: it may have been that of easier requests
_CALM_S = 5.0  # no growth for this long after the server was overloaded
_PROBE_S = 10.0  # when to try a larger limit again after it did not pay: servers scale themselves up


class Gate:
    """Lets as many requests through at once as its limit allows.

    All threads of a process share one gate for each endpoint.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self.limit = AdaptiveLimit(most, clock)
        self.in_flight = 0

    def enter(self, patience_s: float = math.inf) -> Permit | None:
        """Wait for a permit, which is a context manager. Returns None if there is none within ``patience_s`` seconds.

        Without a limit, the wait is still bounded: requests that hold permits end at their own timeouts.
        """
        with self.changed:
            patience = None if patience_s == math.inf else max(0.0, patience_s)
            if not self.changed.wait_for(lambda: self.in_flight < self.limit.now, patience):
                return None
            self.in_flight += 1
            return Permit(self, full=self.in_flight >= self.limit.now)


class Permit:
    """The right to send one request, given back at the end of its ``with`` block."""

    def __init__(self, gate: Gate, full: bool) -> None:
        self._gate = gate
        self._began = gate.clock()
        self._full = full

    def answered(self) -> None:
        """Report that the server has responded."""
        with self._gate.changed:
            self._gate.limit.answered(self._began, self._full)

    def overloaded(self) -> None:
        """Report that the server is overloaded or did not respond."""
        with self._gate.changed:
            self._gate.limit.overloaded(self._began)

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._gate.changed:
            self._gate.in_flight -= 1
            self._gate.changed.notify_all()


_lock = threading.Lock()
_gates: weakref.WeakValueDictionary[tuple[int, str], Gate] = weakref.WeakValueDictionary()


def shared_gate(endpoint: str, most: int) -> Gate:
    """Return the gate of an endpoint in this process. It exists as long as a model uses it.

    Handlers may allow different numbers of requests. The gate allows the largest; the number of threads of each handler
    keeps to its own.
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
    """Decides how many requests at once are best for a server, by trying. The caller locks it.

    The limit doubles while that pays, then grows in small steps. More requests pay as long as latency stays near the
    best seen, or throughput grows by half of what was added. If they don't, the step is undone and tried again later.
    When the server is overloaded, the limit is halved.

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
        """The limit and latency before the last step."""
        self._hold_until = -math.inf
        self._restart()

    @property
    def now(self) -> int:
        """The current limit."""
        return int(self._limit)

    def answered(self, began: float, full: bool) -> None:
        """Record a response to a request sent at ``began``; ``full`` says that all permits were taken at that time."""
        if not full or began < self._since:
            return  # it says nothing about the current limit
        self._seconds += self._clock() - began
        self._count += 1
        if self._count >= max(_LEAST_SAMPLES, self._limit):
            self._judge(self._seconds / self._count)

    def overloaded(self, began: float) -> None:
        """Halve the limit after a refusal. Of the requests sent under one limit, only the first refusal counts."""
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
        """Return whether throughput, requests in flight divided by latency, grew by half of what was added."""
        added = self._limit / limit - 1
        return (self._limit / latency_now) / (limit / latency) >= 1 + added / 2

    def _hold(self, seconds: float) -> None:
        self._doubling = False
        self._before = None
        self._hold_until = self._clock() + seconds

    def _restart(self) -> None:
        self._since = self._clock()
        self._seconds, self._count = 0.0, 0
