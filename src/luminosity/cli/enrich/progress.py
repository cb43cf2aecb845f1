"""The progress of ``lum enrich``: rows done, rows a second and the time that is left."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING

from rich.text import Text

from luminosity._shared.text import shorten
from luminosity.events import Event, RunEnded, Snapshot
from luminosity.runs.views import words
from luminosity.runs.views.terminal import Terminal

if TYPE_CHECKING:
    from luminosity.io.reading.readers import RowCount

__all__ = ["RowProgress"]

_APPEARS_AFTER_S = 1.0  # a shorter run shows nothing
_FIRST_LINE_AFTER_S = 5.0
_LINE_EVERY_S = 10.0  # few enough lines for a log
_LINE_EVERY_AT_MOST_S = 60.0  # in a run that takes hours
_PART_OF_ELAPSED = 0.1  # of the run, between two lines: a log grows with the logarithm of the run's length at first
_RECENT_S = 60.0  # of which the rate is measured: some bundles take seconds


class RowProgress:
    """Shows the progress of the run whose events it gets: one line that changes, or lines of text.

    The engine calls it, on one thread. ``models`` is the number of new columns: a row is done when it has all of them.
    """

    def __init__(self, models: int, total: RowCount | None, is_line: bool) -> None:
        self._models = models
        self._total = total
        self._recent: deque[tuple[float, int]] = deque()
        self._terminal = Terminal() if is_line else None
        self._has_terminal = False
        self._next_at = _FIRST_LINE_AFTER_S
        self._is_broken = False

    def __call__(self, event: Event) -> None:
        """Show the progress if the event brings news about it."""
        if self._is_broken:
            return
        try:
            if isinstance(event, Snapshot):
                self._take(event)
            elif isinstance(event, RunEnded):
                self._leave()
        except (OSError, ValueError):
            self._is_broken = True  # standard error is closed; the run goes on

    def _take(self, snapshot: Snapshot) -> None:
        done = self._done(snapshot)
        if not self._recent or done > self._recent[-1][1]:
            self._recent.append((snapshot.seconds, done))
        while len(self._recent) > 2 and self._recent[0][0] < snapshot.seconds - _RECENT_S:
            self._recent.popleft()
        if self._terminal is not None and snapshot.seconds >= _APPEARS_AFTER_S:
            if not self._has_terminal:
                self._terminal.take()
                self._has_terminal = True
            self._terminal.show(Text(shorten(self.text(snapshot, done), self._terminal.console.size.width - 1)))
        elif self._terminal is None and snapshot.seconds >= self._next_at:
            pause = min(_LINE_EVERY_AT_MOST_S, max(_LINE_EVERY_S, _PART_OF_ELAPSED * snapshot.seconds))
            self._next_at = snapshot.seconds + pause
            sys.stderr.write(self.text(snapshot, done) + "\n")
            sys.stderr.flush()

    def _leave(self) -> None:
        if self._terminal is not None and self._has_terminal:
            self._terminal.give_back()

    def _done(self, snapshot: Snapshot) -> int:
        """Return how many rows have gone through all models."""
        rows = [view.inferences for stage in snapshot.stages for view in stage.inference]
        return min(rows) if len(rows) == self._models else 0

    def text(self, snapshot: Snapshot, done: int) -> str:
        """Return the progress in one line."""
        after = f"lum enrich {words.duration(snapshot.seconds)}: "
        if not done:
            return after + "starting, no row is done yet"
        parts = [f"{done:,} rows"]
        if self._total is not None and self._total.rows >= done:
            about = "" if self._total.is_exact else "about "
            parts = [f"{done:,} of {about}{self._total.rows:,} rows ({done / self._total.rows:.0%})"]
        rate = self._rate(snapshot.seconds)
        if rate:
            parts.append(f"{rate:,.0f} rows/s" if rate >= 10 else f"{rate:.2g} rows/s")
            if self._total is not None and self._total.rows > done:
                parts.append(f"about {words.duration((self._total.rows - done) / rate)} left")
        return after + " · ".join(parts)

    def _rate(self, seconds: float) -> float:
        """Return the rows a second of the last minute."""
        began, rows = self._recent[0]
        return (self._recent[-1][1] - rows) / (seconds - began) if seconds > began else 0.0
