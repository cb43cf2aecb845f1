"""The terminal while a live view has it: what others print comes out above the view, whole."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from luminosity._terminal import is_terminal

_LONGEST_LINE = 1 << 16


class _SteadyConsole(Console):
    """Leaves the cursor visible: hidden, it would stay so if this process were killed."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Terminal:
    """Shows a picture at the bottom of the terminal, and lets all that is printed pass above it."""

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
        for name in ("stdout", "stderr"):
            stream: TextIO = getattr(sys, name)
            if is_terminal(stream):
                stream.flush()
                proxy = _Above(stream, self)
                self._proxies.append(proxy)
                setattr(sys, name, proxy)
                _swap_in_handlers(stream, proxy)
        with self._lock:
            # In the middle of a line, this wraps to the next one; at the beginning of a line it leaves no trace.
            self._stderr.write(" " * (self.console.width - 1) + "\r")
            self._live.start()

    def show(self, picture: RenderableType) -> None:
        with self._lock:
            self._live.update(picture, refresh=True)

    def print_above(self, line: str) -> None:
        with self._lock:
            self.console.print(Text.from_ansi(line), soft_wrap=True)

    def give_back(self) -> None:
        """The picture is gone, and everything writes to where it wrote before."""
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
    """Stands for a stream of the terminal; passes on whole lines."""

    def __init__(self, stream: TextIO, terminal: Terminal) -> None:
        self.stream = stream
        self._terminal: Terminal | None = terminal
        self._process = os.getpid()
        self._line = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        if os.getpid() != self._process:  # the view is that of a parent process, and so is who holds the lock
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
        """Who still holds it writes to the stream itself."""
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
    """Log handlers keep the stream that they were made with."""
    for handler in _handlers():
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)


def _handlers() -> Iterator[logging.Handler]:
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            yield from logger.handlers
