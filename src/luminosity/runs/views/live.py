"""The view of a run under way: in place on a terminal, below its cell in a notebook."""

from __future__ import annotations

import contextlib
import contextvars
import io
import logging
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from html import escape
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from luminosity._shared.notebook import is_terminal
from luminosity.events import Event, RunEnded, RunStarted, Snapshot, Subscriber
from luminosity.runs.views import words
from luminosity.runs.views.choice import APPEARS_AFTER_S
from luminosity.runs.views.frame import frame
from luminosity.runs.views.plain import PlainView, line, summary

__all__ = ["KeptEvents", "LiveView", "NotebookView", "Terminal"]

_EVERY_S = 0.5  # the display may be at the other end of a slow connection
_WIDTH, _HEIGHT = 120, 40  # characters of a frame: a notebook is wide, and scrolls
_STYLE = "white-space: pre; overflow-x: auto; line-height: 1.35; margin: 0; font-size: 12px"
_LONGEST_LINE = 1 << 16  # characters held back while a line has no end
_terminal_taken = threading.Lock()


class NotebookView:
    """Shows the progress of a run below its cell, in one display; at the end a summary replaces it.

    Make it on the thread that runs the cell: the display belongs to that cell, whichever thread updates it.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._display_id = f"luminosity-{secrets.token_hex(8)}"
        self._run: RunStarted | None = None
        self._next_at = APPEARS_AFTER_S
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


def as_html(content: RenderableType) -> str:
    """Return what rich would print as HTML that takes font and background from the notebook."""
    # Not for Jupyter: there rich would display what it prints, and ignore the file.
    console = Console(
        file=io.StringIO(), record=True, width=_WIDTH, highlight=False, color_system="standard", force_jupyter=False
    )
    console.print(content)
    code = console.export_html(inline_styles=True, code_format="{code}").rstrip()
    return f'<pre style="{escape(_STYLE)}">{code}</pre>'


class _SteadyConsole(Console):
    """Never hides the cursor: it would stay hidden if this process were killed."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Terminal:
    """Shows a picture at the bottom of the terminal, and prints everything else above it."""

    def __init__(self) -> None:
        self._stderr = sys.stderr
        self.console = _SteadyConsole(file=self._stderr, highlight=False)
        self._live = Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._lock = threading.RLock()  # one writer at a time, so that the picture's place is always known
        self._proxies: list[_Above] = []

    def take(self) -> None:
        """Start the picture, and redirect the standard streams and log handlers that write to the terminal."""
        for name in ("stdout", "stderr"):
            stream: TextIO = getattr(sys, name)
            if is_terminal(stream):
                stream.flush()
                proxy = _Above(stream, self)
                self._proxies.append(proxy)
                setattr(sys, name, proxy)
                _swap_in_handlers(stream, proxy)
        with self._lock:
            # In the middle of a line, this moves to the next line; at the start of a line it leaves no trace.
            self._stderr.write(" " * (self.console.width - 1) + "\r")
            self._live.start()

    def show(self, picture: RenderableType) -> None:
        """Replace the picture."""
        with self._lock:
            self._live.update(picture, refresh=True)

    def print_above(self, line: str) -> None:
        """Print a line above the picture. Any thread may call it."""
        with self._lock:
            self.console.print(Text.from_ansi(line), soft_wrap=True)

    def give_back(self) -> None:
        """Remove the picture, and restore the standard streams and log handlers."""
        try:
            with self._lock:
                self._live.stop()
        finally:
            for proxy in self._proxies:
                for name in ("stdout", "stderr"):
                    if getattr(sys, name) is proxy:
                        setattr(sys, name, proxy.stream)
                _swap_in_handlers(proxy, proxy.stream)
        for proxy in self._proxies:
            proxy.end()


class _Above(io.TextIOBase):
    """Replaces a stream of the terminal; passes on whole lines."""

    def __init__(self, stream: TextIO, terminal: Terminal) -> None:
        self.stream = stream
        self._terminal: Terminal | None = terminal
        self._process = os.getpid()
        self._line = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        if os.getpid() != self._process:  # a fork: the view, and a thread that may hold the lock, are the parent's
            return self.stream.write(text)
        with self._lock:
            terminal = self._terminal
            if terminal is None:  # the view has ended
                return self.stream.write(text)
            *lines, self._line = (self._line + text).split("\n")
            if len(self._line) > _LONGEST_LINE:
                lines.append(self._line)
                self._line = ""
            for line in lines:
                terminal.print_above(line)
        return len(text)

    def flush(self) -> None:
        if self._terminal is None:
            self.stream.flush()

    def end(self) -> None:
        """Pass everything on from now; code may still hold this object."""
        with self._lock:
            self._terminal = None
            if self._line:
                self.stream.write(f"{self._line}\n")

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _swap_in_handlers(old: Any, new: Any) -> None:
    """Let log handlers that write to ``old`` write to ``new``."""
    for handler in _handlers():
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)


def _handlers() -> Iterator[logging.Handler]:
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            yield from logger.handlers


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
        elif isinstance(event, Snapshot) and event.seconds >= APPEARS_AFTER_S and self._run is not None:
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
