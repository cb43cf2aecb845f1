"""The clock of a run's processing time: the real one, or one that a TestStream moves."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "WallClock"]


class Clock(Protocol):
    """Tells the current processing time."""

    def micros(self) -> int:
        """Return the processing time in microseconds since 1970."""
        ...


class WallClock:
    """The machine's clock."""

    def micros(self) -> int:
        """Return the processing time in microseconds since 1970."""
        return time.time_ns() // 1000


class ManualClock:
    """A clock that stands still until it is moved. It starts at 0, as the tests of pipelines expect."""

    def __init__(self) -> None:
        self._micros = 0

    def micros(self) -> int:
        """Return the processing time in microseconds since 1970."""
        return self._micros

    def advance(self, micros: int) -> None:
        """Move the clock forward."""
        self._micros += micros
