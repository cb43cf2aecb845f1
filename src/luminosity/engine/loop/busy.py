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
        self._began_at: float | None = None
        self._ended_at: float | None = None

    def begin(self) -> None:
        self._count()
        self._running += 1
        if self._began_at is None:
            self._began_at = self._counted_until

    def end(self) -> None:
        self._count()
        self._running -= 1
        self._ended_at = self._counted_until

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

    @property
    def first_to_last_seconds(self) -> float:
        """From the first begin to the last end: what is known of bundles that ended happened in this time."""
        return 0.0 if self._began_at is None or self._ended_at is None else self._ended_at - self._began_at

    def _count(self) -> None:
        now = time.monotonic()
        if self._running:
            self._summed += self._running * (now - self._counted_until)
            self._spanned += now - self._counted_until
        self._counted_until = now
