"""The live view: progress on a terminal, redrawn in place; and the choice of a view."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from luminosity._shared.notebook import kernel_shell
from luminosity._shared.terminal import is_terminal
from luminosity.events import Event, RunEnded, RunStarted, Snapshot, Subscriber
from luminosity.runs.views import words
from luminosity.runs.views.frame import frame
from luminosity.runs.views.notebook import NotebookView
from luminosity.runs.views.plain import PlainView
from luminosity.runs.views.summary import summary
from luminosity.runs.views.terminal import Terminal

__all__ = ["LiveView", "is_live", "view_for"]


_APPEARS_AFTER_S = 1.0  # a shorter run shows no view

_terminal_taken = threading.Lock()


def is_possible() -> bool:
    """Return whether standard error is a terminal that can redraw a picture in place."""
    return is_terminal(sys.stderr) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


class LiveView:
    """Shows the progress of a run that takes a while, and a summary at the end.

    Only one run has the terminal at a time: a second one prints plain lines.
    """

    def __init__(self) -> None:
        self._run: RunStarted | None = None
        self._terminal: Terminal | None = None
        self._instead: Subscriber | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._run = event
        elif self._instead is not None:
            self._instead(event)
        elif isinstance(event, Snapshot) and event.seconds >= _APPEARS_AFTER_S and self._run is not None:
            self._draw(self._run, event)
        elif isinstance(event, RunEnded) and self._run is not None and self._terminal is not None:
            self._leave(self._run, self._terminal, event)
        elif isinstance(event, RunEnded) and self._run is not None:
            plain = PlainView()  # the view has not appeared; a summary may be worth a look
            plain(self._run)
            plain(event)

    def _draw(self, run: RunStarted, snapshot: Snapshot) -> None:
        try:
            if self._terminal is None:
                if not _terminal_taken.acquire(blocking=False):
                    self._instead = PlainView()
                    self._instead(run)
                    return
                self._terminal = Terminal()
                self._terminal.take()
                if text := words.how_to_stop(run):
                    self._terminal.print_above(text)
            size = self._terminal.console.size
            self._terminal.show(frame(run, snapshot, size.width, size.height))
        except (OSError, ValueError):
            self._give_up()

    def _leave(self, run: RunStarted, terminal: Terminal, ended: RunEnded) -> None:
        try:
            terminal.give_back()
            terminal.console.print(summary(run, ended))
            _terminal_taken.release()
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        """Show nothing more: the terminal is gone. The run goes on."""
        self._instead = lambda event: None
        if self._terminal is not None:
            with contextlib.suppress(OSError, ValueError):
                self._terminal.give_back()
        _terminal_taken.release()


def is_live(mode: str) -> bool:
    """Return whether ``--progress=mode`` shows the live view here."""
    return mode == "auto" and is_possible()


def view_for(mode: str) -> Subscriber | None:
    """Return the view for ``--progress=mode``, or None for ``off``. Call it on the thread that starts the run."""
    if mode == "off":
        return None
    if mode == "auto" and kernel_shell() is not None:
        return NotebookView()
    return LiveView() if is_live(mode) else PlainView()
