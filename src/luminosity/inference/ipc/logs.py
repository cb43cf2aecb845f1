"""The logs of the serving process: everything goes to a bounded file, and warnings to its clients, too."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
from typing import Any

__all__ = ["LogCollector", "LogValues", "last_lines", "limit_file", "log_again"]

LogValues = dict[str, Any]
"""A log record as plain values, which can be pickled."""

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
_MOST_RECORDS = 1000  # the oldest are lost if no client takes them
_LARGEST_FILE = 1 << 20  # bytes; libraries may write without end
_KEPT_BYTES = 1 << 16  # bytes that stay when the file is shortened
_LAST_LINES = 20  # enough for a traceback's end


class LogCollector(logging.Handler):
    """Keeps warnings until a message takes them to a client, which logs them again; the oldest may be lost."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: collections.deque[LogValues] = collections.deque(maxlen=_MOST_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        try:
            carried = {name: getattr(record, name) for name in _CARRIED}
            self._kept.append({**carried, "msg": self.format(record)})  # includes the traceback
        except Exception:
            self.handleError(record)

    def take(self) -> list[LogValues]:
        """Return the records that no client has taken yet; may be called from any thread."""
        taken: list[LogValues] = []
        with contextlib.suppress(IndexError):
            while len(taken) < _MOST_RECORDS:
                taken.append(self._kept.popleft())
        return taken


def log_again(records: list[LogValues]) -> None:
    """Log records of the serving process in this process."""
    for values in records:
        logger = logging.getLogger(values["name"])
        if logger.isEnabledFor(values["levelno"]):
            logger.handle(logging.makeLogRecord(values))


def limit_file(path: str) -> None:
    """Shorten the file to its end if it is too large. Writers append to it, so they go on at its new end."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.getsize(path) <= _LARGEST_FILE:
            return
        kept = _tail(path)
        os.truncate(path, 0)
        with open(path, "ab") as file:
            file.write(kept)


def last_lines(path: str) -> str:
    """Return the last lines of the file, or an empty string if there is no file."""
    with contextlib.suppress(FileNotFoundError):
        return "\n".join(_tail(path).decode(errors="replace").splitlines()[-_LAST_LINES:])
    return ""


def _tail(path: str) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _KEPT_BYTES))
        return file.read(_KEPT_BYTES)
