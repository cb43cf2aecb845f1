"""The output that workers print while a live view has the terminal.

The workers' standard output and error are then sockets of the runner, which prints their lines above the view.
Otherwise workers would write across the view.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import selectors
import socket
import sys
import threading
from typing import TextIO

from luminosity._shared.notebook import is_terminal

__all__ = ["WorkerPrints", "prepare_streams", "print_to"]


_STREAMS = {1: "stdout", 2: "stderr"}
_READ_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16  # characters held back while a line has no end
_STOP_TIMEOUT_S = 5.0  # a terminal that takes no output must not hold up the end of a run


def print_to(sockets: dict[str, str]) -> None:
    """Connect this worker's standard streams to ``sockets``."""
    for number, path in sockets.items():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)  # if that fails, the stream stays the terminal
            os.dup2(connection.fileno(), int(number))


def prepare_streams() -> None:
    """Let user code print any character, in whole lines.

    Characters that the output's encoding lacks become escapes: printing must not fail a bundle. With
    ``PYTHONUNBUFFERED``, as containers have it, ``print`` writes a line and its end one after the other, and the lines
    of several workers would get mixed up.
    """
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
        if stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)


class WorkerPrints:
    """Accepts the workers' connections in the runner's process, and prints their lines, on a thread of its own."""

    def __init__(self, folder: str) -> None:
        self.sockets: dict[str, str] = {}  # by file descriptor, as a string because JSON's keys are strings
        self._selector = selectors.DefaultSelector()
        for number, name in _STREAMS.items():
            if is_terminal(getattr(sys, name)):
                path = self.sockets[str(number)] = os.path.join(folder, f"prints-{number}")
                self._selector.register(_listener(path), selectors.EVENT_READ, name)
        wakeup, self._wake = socket.socketpair()
        self._selector.register(wakeup, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="luminosity-prints", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Print what is left and stop. Call it when the workers have ended."""
        self._wake.close()
        self._thread.join(_STOP_TIMEOUT_S)

    def _serve(self) -> None:
        is_over = False
        while not is_over:
            ready = self._selector.select()
            is_over = any(key.data is None for key, _ in ready)
            for key, _ in ready:
                self._take(key)
        while ready := [key for key, _ in self._selector.select(timeout=0) if key.data is not None]:
            for key in ready:
                self._take(key)
        for key in list(self._selector.get_map().values()):
            self._close(key)
        self._selector.close()

    def _take(self, key: selectors.SelectorKey) -> None:
        assert isinstance(key.fileobj, socket.socket)
        if isinstance(key.data, _Lines):
            with contextlib.suppress(ConnectionError):  # its worker was killed
                if data := key.fileobj.recv(_READ_BYTES):
                    key.data.take(data)
                    return
            self._close(key)
        elif key.data is not None:
            connection, _ = key.fileobj.accept()
            self._selector.register(connection, selectors.EVENT_READ, _Lines(key.data))

    def _close(self, key: selectors.SelectorKey) -> None:
        assert isinstance(key.fileobj, socket.socket)
        self._selector.unregister(key.fileobj)
        key.fileobj.close()
        if isinstance(key.data, _Lines):
            key.data.end()


class _Lines:
    """The lines that one worker writes to one of its streams."""

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
        # Looked up each time, because a live view replaces the stream. A progress bar overwrites its line: print only
        # the last state.
        stream: TextIO = getattr(sys, self._stream)
        with contextlib.suppress(OSError, ValueError):  # the stream is closed, which must not stop workers
            stream.write(line.rstrip("\r").rsplit("\r", 1)[-1] + "\n")
            stream.flush()


def _listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener
