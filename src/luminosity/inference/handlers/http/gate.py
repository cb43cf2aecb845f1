"""Lets as many requests through at once as the limit says."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType

from luminosity.inference.handlers.http.limit import AdaptiveLimit

__all__ = ["Gate", "Slot", "gate_of"]


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
