"""Progress as a picture on a terminal, drawn again and again."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from luminosity._terminal import is_terminal
from luminosity.engine.monitor.views.frame import frame
from luminosity.engine.monitor.views.plain import PlainView
from luminosity.engine.monitor.views.summary import summary
from luminosity.engine.monitor.views.terminal import Terminal
from luminosity.events import Event, RunEnded, RunStarted, Snapshot, Subscriber

# A short run says nothing: its results are there before anyone wonders.
_APPEARS_AFTER_S = 1.0

_terminal_taken = threading.Lock()


def is_possible() -> bool:
    """Whether standard error is a terminal on which a picture can be drawn again in its place."""
    return is_terminal(sys.stderr) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


class LiveView:
    """Appears when a run takes a while; leaves a summary. One at a time: a second run writes plain lines."""

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

    def _draw(self, run: RunStarted, snapshot: Snapshot) -> None:
        try:
            if self._terminal is None:
                if not _terminal_taken.acquire(blocking=False):
                    self._instead = PlainView()
                    self._instead(run)
                    return
                self._terminal = Terminal()
                self._terminal.take()
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
        """Nobody looks at the terminal any more; the run goes on."""
        self._instead = lambda event: None
        if self._terminal is not None:
            with contextlib.suppress(OSError, ValueError):
                self._terminal.give_back()
        _terminal_taken.release()


def is_live(mode: str) -> bool:
    return mode == "auto" and is_possible()


def view_for(mode: str) -> Subscriber | None:
    """For ``--progress=mode``."""
    if mode == "off":
        return None
    return LiveView() if is_live(mode) else PlainView()
