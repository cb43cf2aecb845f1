"""What the host logs: all of it to a bounded file, and warnings to the users of the host, too."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
from typing import Any

__all__ = ["Logged", "Records", "bound", "last_words", "log_again"]

Logged = dict[str, Any]
"""A log record as plain values."""

_CARRIED = (
    "name",
    "levelno",
    "levelname",
    "pathname",
    "filename",
    "module",
    "lineno",
    "funcName",
    "created",
    "process",
)
_MOST_RECORDS = 1000
_LARGEST_FILE = 1 << 20
_KEPT_BYTES = 1 << 16
_LAST_LINES = 20


class Records(logging.Handler):
    """Keeps warnings until a message takes them to a client, which logs them as its own; the oldest may be lost."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: collections.deque[Logged] = collections.deque(maxlen=_MOST_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            carried = {name: getattr(record, name) for name in _CARRIED}
            self._kept.append({**carried, "msg": self.format(record)})  # with the traceback, if there is one
        except Exception:
            self.handleError(record)

    def take(self) -> list[Logged]:
        taken: list[Logged] = []
        with contextlib.suppress(IndexError):
            while len(taken) < _MOST_RECORDS:
                taken.append(self._kept.popleft())
        return taken


def log_again(records: list[Logged]) -> None:
    """In a client: log what the host said, where this process's own records go."""
    for values in records:
        logger = logging.getLogger(values["name"])
        if logger.isEnabledFor(values["levelno"]):
            logger.handle(logging.makeLogRecord(values))


def bound(path: str) -> None:
    """Shorten the file where libraries write much; it is written by appending, so that writers go on at its end."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.getsize(path) <= _LARGEST_FILE:
            return
        kept = _tail(path)
        os.truncate(path, 0)
        with open(path, "ab") as file:
            file.write(kept)


def last_words(path: str) -> str:
    """The last lines that the host wrote to its standard streams; they may say why it ended."""
    with contextlib.suppress(FileNotFoundError):
        return "\n".join(_tail(path).decode(errors="replace").splitlines()[-_LAST_LINES:])
    return ""


def _tail(path: str) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _KEPT_BYTES))
        return file.read(_KEPT_BYTES)
