"""What workers print, handed to the runner while a live view has the terminal.

Their standard output and error are then connections to the runner, which prints what comes through: line by line above
the view, where otherwise it would be written across it.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import socket
import sys
import threading
from typing import TextIO

from luminosity._terminal import is_terminal

_STREAMS = {1: "stdout", 2: "stderr"}
_READ_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16
_STOP_TIMEOUT_S = 5.0


def print_to(sockets: dict[str, str]) -> None:
    """In a worker: let its standard streams write to ``sockets``."""
    for number, path in sockets.items():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)  # where that fails they write to the terminal, as ever
            os.dup2(connection.fileno(), int(number))


class WorkerPrints:
    """In the runner: takes the workers' connections, and prints what comes through them."""

    def __init__(self, folder: str) -> None:
        self.sockets: dict[str, str] = {}  # by the number of the standard stream, a string since it crosses as JSON
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
        """Print what is left; the workers have ended."""
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
    """What one worker writes to one of its streams."""

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


def _listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener
