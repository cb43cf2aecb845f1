"""How long something was at work."""

from __future__ import annotations

import time


class BusyTime:
    """Counts the bundles that run at the same time, and the seconds they take."""

    def __init__(self) -> None:
        self._running = 0
        self._counted_until = 0.0
        self._summed = 0.0
        self._spanned = 0.0

    def begin(self) -> None:
        self._count()
        self._running += 1

    def end(self) -> None:
        self._count()
        self._running -= 1

    @property
    def seconds(self) -> float:
        """Summed over all bundles, those included that run now."""
        self._count()
        return self._summed

    @property
    def spanned_seconds(self) -> float:
        """The time in which there was at least one."""
        self._count()
        return self._spanned

    def _count(self) -> None:
        now = time.monotonic()
        if self._running:
            self._summed += self._running * (now - self._counted_until)
            self._spanned += now - self._counted_until
        self._counted_until = now
