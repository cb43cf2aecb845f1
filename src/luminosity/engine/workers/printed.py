"""What workers print, handed to the runner while a live view has the terminal.

Their standard output and error are then named pipes, and the runner prints what comes through: line by line above the
view, where otherwise it would be written across it.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import sys
import threading
from typing import TextIO

from luminosity.engine.tty import is_terminal

_STREAMS = {1: "stdout", 2: "stderr"}
_READ_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16
_STOP_TIMEOUT_S = 5.0


def print_to(pipes: dict[str, str]) -> None:
    """In a worker: let its standard streams write to ``pipes``."""
    for number, path in pipes.items():
        pipe = os.open(path, os.O_WRONLY)
        os.dup2(pipe, int(number))
        os.close(pipe)


class WorkerPrints:
    """In the runner: reads the pipes, and prints what comes through them."""

    def __init__(self, folder: str) -> None:
        self.pipes: dict[str, str] = {}  # by the number of the standard stream, a string since it crosses as JSON
        self._lines: dict[int, _Lines] = {}
        for number, name in _STREAMS.items():
            if is_terminal(getattr(sys, name)):
                path = self.pipes[str(number)] = os.path.join(folder, f"printed-{number}")
                os.mkfifo(path, 0o600)
                # Open for writing, too: it does not end when there is no worker.
                self._lines[os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)] = _Lines(name)
        self._wakeup, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="luminosity-prints", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Print what is left; the workers have ended."""
        os.write(self._wake, b".")
        self._thread.join(_STOP_TIMEOUT_S)

    def _serve(self) -> None:
        selector = selectors.DefaultSelector()
        for pipe in (self._wakeup, *self._lines):
            selector.register(pipe, selectors.EVENT_READ)
        is_over = False
        while not is_over:
            ready = {key.fd for key, _ in selector.select()}
            is_over = self._wakeup in ready
            for pipe in ready - {self._wakeup}:
                self._lines[pipe].take(os.read(pipe, _READ_BYTES))
        for pipe, lines in self._lines.items():
            with contextlib.suppress(BlockingIOError):  # it is empty
                while True:
                    lines.take(os.read(pipe, _READ_BYTES))
            lines.end()
        selector.close()
        for pipe in (self._wakeup, self._wake, *self._lines):
            os.close(pipe)


class _Lines:
    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        for line in lines:
            self._print(line)
        if len(self._rest) > _LONGEST_LINE:
            self.end()

    def end(self) -> None:
        rest, self._rest = self._rest, ""
        if rest:
            self._print(rest)

    def _print(self, line: str) -> None:
        # Looked up each time: while a live view is there, it is the view's. Of a line that was written over and over,
        # as progress bars do, the last state counts.
        stream: TextIO = getattr(sys, self._stream)
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, and workers must not wait for that
            stream.write(line.rstrip("\r").rsplit("\r", 1)[-1] + "\n")
            stream.flush()
