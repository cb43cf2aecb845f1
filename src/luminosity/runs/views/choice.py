"""The choice of a view for a run. What draws it is imported when there is something to show: most short runs show none.

Rich, with which views draw, takes 50 ms to import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from luminosity._shared.notebook import is_terminal, kernel_shell
from luminosity.events import Event, RunEnded, RunStarted, Snapshot, Subscriber

if TYPE_CHECKING:
    from luminosity.runs.views.live import KeptEvents

__all__ = ["APPEARS_AFTER_S", "LateView", "is_live", "is_worth_printing", "kept_events", "view_for"]

APPEARS_AFTER_S = 1.0  # a shorter run shows no view
_SUMMARY_AFTER_S = 2.0  # shorter runs need none


class LateView:
    """Makes a view as soon as it may show something, and passes events on to it."""

    def __init__(self, make: Callable[[], Subscriber]) -> None:
        self.make = make
        self._view: Subscriber | None = None
        self._run: RunStarted | None = None

    def __call__(self, event: Event) -> None:
        if self._view is None and isinstance(event, RunStarted):
            self._run = event
        elif self._view is not None:
            self._view(event)
        elif self._run is not None and _shows_something(event):
            self._view = self.make()
            self._view(self._run)
            self._view(event)


def _shows_something(event: Event) -> bool:
    if isinstance(event, RunEnded):
        return is_worth_printing(event)
    return isinstance(event, Snapshot) and event.seconds >= APPEARS_AFTER_S


def is_worth_printing(ended: RunEnded) -> bool:
    """Return whether a run has taken long, or its code has counted something: otherwise its results say enough."""
    return ended.seconds >= _SUMMARY_AFTER_S or any(not view.of_library for view in ended.metrics)


def is_live(mode: str) -> bool:
    """Return whether ``--progress=mode`` shows the live view here: a terminal that can redraw a picture in place."""
    return mode == "auto" and is_terminal(sys.stderr) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def view_for(mode: str) -> Subscriber | None:
    """Return the view for ``--progress=mode``, or None for ``off``. Call it on the thread that starts the run."""
    if mode == "off":
        return None
    if mode == "auto" and kernel_shell() is not None:
        from luminosity.runs.views.live import NotebookView

        return NotebookView()  # now, since its display belongs to the cell that this thread runs
    return LateView(_live_view if is_live(mode) else _plain_view)


def kept_events() -> KeptEvents | None:
    """Return a keeper of events in a notebook; elsewhere nothing shows a result, and there is none."""
    if kernel_shell() is None:
        return None
    from luminosity.runs.views.live import KeptEvents

    return KeptEvents()


def _live_view() -> Subscriber:
    from luminosity.runs.views.live import LiveView

    return LiveView()


def _plain_view() -> Subscriber:
    from luminosity.runs.views.plain import PlainView

    return PlainView()
