"""The log lines of a run, kept in two files beside its record, within a size: the oldest lines go.

Lines are appended to the younger file. When it has half of the size, it becomes the older one, whose lines go. Lines
have numbers, so that a reader sees how many have gone. Only this user can read the files. Whoever writes a line has
hidden its secrets before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from luminosity._shared.shared_files import is_own_file
from luminosity.runs import records

__all__ = ["LEVELS", "MOST_BYTES", "Level", "LogLine", "LogWriter", "log_writer", "paths_of", "read_lines"]

_LOGGER = logging.getLogger(__name__)

Level = Literal["debug", "info", "warning", "error", "critical"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error", "critical")
MOST_BYTES = 5_000_000  # of a run, as much as its record may have: some 25,000 lines
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_YOUNGER, _OLDER = ".log.jsonl", ".log.old.jsonl"


class LogLine(NamedTuple):
    """A line, as it was logged."""

    seconds: float  # since the run started
    level: Level
    message: str  # bounded
    logger: str = ""
    worker: str = ""  # empty: the process that started the run
    step: str = ""
    traceback: str = ""
    number: int = 0  # from 1; the writer gives it


_TEXTS = ("message", "logger", "worker", "step", "traceback")


def paths_of(record: Path) -> tuple[Path, Path]:
    """Return the files with the lines of the run whose record is ``record``: the older one, and the younger one."""
    run = record.name.removesuffix(".json")
    return record.with_name(run + _OLDER), record.with_name(run + _YOUNGER)


def log_writer(run_dir: str | None, run_id: str) -> LogWriter | None:
    """Return a writer for the folder of ``--run_dir``, or None if runs are not recorded."""
    try:
        folder = records.folder(run_dir)
    except RuntimeError:
        return None  # the user has no home folder; the recorder says so
    return None if folder is None else LogWriter(records.path_of(folder, run_id))


class LogWriter:
    """Writes the lines of one run. Any thread may call it. The owner calls :meth:`close`.

    The files are made with the first line. Every line is one write: a run that is killed loses none. If writing fails,
    the writer warns once and stops; the run goes on.
    """

    def __init__(self, record: Path, most_bytes: int = MOST_BYTES) -> None:
        self._older, self._younger = paths_of(record)
        self._most_bytes = most_bytes // 2
        self._lock = threading.RLock()  # what is collected meanwhile may log on the same thread
        self._descriptor: int | None = None
        self._size = 0
        self._number = 0
        self._is_over = False
        self._process = os.getpid()

    def write(self, line: LogLine) -> None:
        """Append a line, which gets its number. Does nothing in a process that the user's code has forked."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._is_over:
                return
            try:
                self._write(line)
                return
            except OSError as error:
                problem, is_first = error, self._number == 1
                self.close()
        if is_first:
            return  # nothing can be written there, which the recorder says
        _LOGGER.warning("log lines of this run are not kept any more: %s", problem)

    def _write(self, line: LogLine) -> None:
        self._number += 1
        held = {name: value for name, value in line._replace(number=self._number)._asdict().items() if value != ""}
        data = _ENCODER.encode(held).encode() + b"\n"
        if self._descriptor is None or self._size + len(data) > self._most_bytes:
            self._begin_file()
        assert self._descriptor is not None
        self._size += len(data)
        os.write(self._descriptor, data)

    def _begin_file(self) -> None:
        if self._descriptor is None:
            self._younger.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            os.close(self._descriptor)
            self._descriptor = None
            os.replace(self._younger, self._older)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._younger, flags, 0o600)
        self._size = 0

    def close(self) -> None:
        """Close the file, and write no more lines. May be called more than once."""
        with self._lock:
            self._is_over = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def read_lines(path: Path) -> list[LogLine]:
    """Return the lines of one file, the oldest first, without those that are incomplete.

    Raises ``OSError`` if there is no such file, or if it is another user's.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not is_own_file(descriptor):
            raise PermissionError(f"{path} is not a file of this user")
        content = file.read(MOST_BYTES)
    found: list[LogLine] = []
    for line in content.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            found.append(_line(json.loads(line)))
    return found


def _line(data: Any) -> LogLine:
    """Return the line that was written as ``data``. Raises ``ValueError`` for anything else."""
    if not isinstance(data, dict):
        raise ValueError(f"found {data!r:.100}, expected a line of a log")
    known = cast("dict[str, Any]", data)  # a later version may write more
    texts = [known.get(name, "") for name in _TEXTS]
    seconds, level, number = known.get("seconds"), known.get("level"), known.get("number")
    if not isinstance(seconds, (int, float)) or not isinstance(number, int):
        raise ValueError(f"found {data!r:.100}, expected a line of a log with numbers")
    if level not in LEVELS or not all(type(text) is str for text in texts):
        raise ValueError(f"found {data!r:.100}, expected a line of a log")
    return LogLine(seconds, level, *texts, number=number)
