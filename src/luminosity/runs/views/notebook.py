"""Runs in a notebook: progress in one display that is updated, and a result that shows itself."""

from __future__ import annotations

import contextvars
import io
import secrets
from html import escape
from typing import Any

from rich.console import Console, Group, RenderableType

from luminosity._shared.notebook import kernel_shell
from luminosity.events import Event, RunEnded, RunStarted, Snapshot
from luminosity.runs.views.frame import frame
from luminosity.runs.views.plain import line, summary

__all__ = ["KeptEvents", "NotebookView", "kept_events"]

_APPEARS_AFTER_S = 1.0  # a shorter run shows nothing
_EVERY_S = 0.5  # the display may be at the other end of a slow connection
_WIDTH, _HEIGHT = 120, 40  # characters of a frame: a notebook is wide, and scrolls
_STYLE = "white-space: pre; overflow-x: auto; line-height: 1.35; margin: 0; font-size: 12px"


class NotebookView:
    """Shows the progress of a run below its cell, in one display; at the end a summary replaces it.

    Make it on the thread that runs the cell: the display belongs to that cell, whichever thread updates it.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._display_id = f"luminosity-{secrets.token_hex(8)}"
        self._run: RunStarted | None = None
        self._next_at = _APPEARS_AFTER_S
        self._is_shown = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._run = event
        elif self._run is None:
            return
        elif isinstance(event, Snapshot) and event.seconds >= self._next_at:
            self._next_at = event.seconds + _EVERY_S
            self._show(frame(self._run, event, _WIDTH, _HEIGHT), line(self._run, event))
        elif isinstance(event, RunEnded) and self._is_shown:
            self._show(summary(self._run, event), f"{self._run.title} {event.state} after {event.seconds:.1f} s")

    def _show(self, content: RenderableType, text: str) -> None:
        from IPython.display import display, update_display

        data = {"text/html": as_html(content), "text/plain": text}
        publish: Any = update_display if self._is_shown else display
        self._is_shown = True
        self._context.run(publish, data, raw=True, display_id=self._display_id)


class KeptEvents:
    """Keeps what the result of a run shows: how it began, and its last snapshot or its end."""

    def __init__(self) -> None:
        self._run: RunStarted | None = None
        self._last: Snapshot | RunEnded | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._run = event
        elif isinstance(event, Snapshot | RunEnded):
            self._last = event

    def as_html(self) -> str | None:
        """Return the stages and the summary of the run as HTML, or None if it has hardly begun."""
        run, last = self._run, self._last
        if run is None or last is None:
            return None
        if isinstance(last, Snapshot):
            return as_html(frame(run, last, _WIDTH, _HEIGHT))
        return as_html(Group(frame(run, last.last, _WIDTH, _HEIGHT), summary(run, last)))


def kept_events() -> KeptEvents | None:
    """Return a keeper of events in a notebook; elsewhere nothing shows a result, and there is none."""
    return KeptEvents() if kernel_shell() is not None else None


def as_html(content: RenderableType) -> str:
    """Return what rich would print as HTML that takes font and background from the notebook."""
    # Not for Jupyter: there rich would display what it prints, and ignore the file.
    console = Console(
        file=io.StringIO(), record=True, width=_WIDTH, highlight=False, color_system="standard", force_jupyter=False
    )
    console.print(content)
    code = console.export_html(inline_styles=True, code_format="{code}").rstrip()
    return f'<pre style="{escape(_STYLE)}">{code}</pre>'
