"""What user code prints on a node of a cluster, sent to the driver's terminal with the log messages."""

from __future__ import annotations

import io
import logging
import sys
import threading

from luminosity.engine.fnapi.logs import PRINTED

__all__ = ["print_through_logs"]

_LONGEST_LINE = 1 << 16  # characters held back while a line has no end


class _LoggedStream(io.TextIOBase):
    """A text stream whose lines are log records. Any thread may write."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{PRINTED}.{name}")
        self._logger.setLevel(logging.INFO)
        self._rest = ""
        self._lock = threading.Lock()
        self._here = threading.local()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            if len(self._rest) > _LONGEST_LINE:
                lines.append(self._rest)
                self._rest = ""
        for line in lines:
            self._print(line)
        return len(text)

    def _print(self, line: str) -> None:
        if getattr(self._here, "is_printing", False):
            return  # a handler of log records prints itself
        self._here.is_printing = True
        try:
            self._logger.info("%s", line.rstrip("\r").rsplit("\r", 1)[-1])
        finally:
            self._here.is_printing = False


def print_through_logs() -> None:
    """Let this process print through its log messages from now on."""
    sys.stdout = _LoggedStream("stdout")
    sys.stderr = _LoggedStream("stderr")
