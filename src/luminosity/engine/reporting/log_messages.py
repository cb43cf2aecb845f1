"""What workers and this process log during a run: all lines, and warnings and errors as a bounded number of events."""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from luminosity._shared.text import Private, shorten, shorten_middle
from luminosity.engine.fnapi.connection import WorkerOrigin, worker_origin
from luminosity.runs.log_lines import Level as LineLevel
from luminosity.runs.manifest.masking import mask_text

__all__ = ["MOST_TRACEBACK", "LogCapture", "LogTally", "Logged", "bounded_traceback"]

MOST_TRACEBACK = 16_000  # characters: enough for deep stacks, small in a record
_MOST_MESSAGE = 2000  # characters
_MOST_EVENTS = 500  # of a run: each place in the code needs one, so this bounds the memory, too
_MOST_OF_PLACE = 50  # different messages of one place in the code, such as one for each file; others are left out
_FIRST_REPEAT_S = 5.0  # after that, equal messages are counted; the pause doubles, so that long runs stay small

_PROBE = "luminosity.log_messages.probe"  # the logger of a record that is made to see whether our factory is called

Level = Literal["warning", "error", "critical"]


def bounded_traceback(text: str) -> str:
    """Return a traceback without secrets, and without its middle if it is very long.

    >>> len(bounded_traceback("line\\n" * 10_000)) <= MOST_TRACEBACK
    True
    """
    return shorten_middle(mask_text(text.strip("\n")), MOST_TRACEBACK)


@dataclass(frozen=True)
class Logged:
    """A message, and how often it was logged since the last event about it."""

    level: Level
    message: str
    logger: str = ""
    place: tuple[str, int] = ("", 0)  # file and line
    worker: str = ""
    step: str = ""
    traceback: str = ""
    count: int = 1
    left_out: int = 0  # further messages that this one stands for, which differ from each other
    whole: int | None = None  # a hash of the message before it was cut and masked


class _Key(NamedTuple):
    place: tuple[str, int]
    level: Level
    message: int | str | None  # None for those of a place that has had too many different ones


@dataclass
class _Repeated:
    due_at: float
    pause_s: float = _FIRST_REPEAT_S
    latest: list[Logged] = field(default_factory=list[Logged])  # at most one, with the count


class LogTally:
    """Decides which messages become events: the first of each kind at once, equal ones later with their count.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: dict[_Key, _Repeated] = {}
        self._of_place: dict[tuple[tuple[str, int], Level], int] = {}
        self._told = 0
        self._untold = 0

    def add(self, logged: Logged, now: float) -> Logged | None:
        """Count a message. Returns it if it should become an event at once."""
        with self._lock:
            key = _Key(logged.place, logged.level, logged.message if logged.whole is None else logged.whole)
            if key not in self._kinds:
                different = self._of_place.get((logged.place, logged.level), 0)
                if different < _MOST_OF_PLACE and self._told < _MOST_EVENTS:
                    self._of_place[logged.place, logged.level] = different + 1
                    self._kinds[key] = _Repeated(now + _FIRST_REPEAT_S)
                    self._told += 1
                    return logged
                if not different:
                    self._untold += 1
                    return None
                key = key._replace(message=None)
            kind = self._kinds.setdefault(key, _Repeated(now + _FIRST_REPEAT_S))
            kind.latest = [replace(logged, count=logged.count + sum(each.count for each in kind.latest))]
            return None

    def due(self, now: float, *, is_last: bool = False) -> list[Logged]:
        """Return the messages that were repeated, if it is time for an event about them. ``is_last``: in any case."""
        found: list[Logged] = []
        with self._lock:
            for key, kind in self._kinds.items():
                if not kind.latest or not (is_last or now >= kind.due_at):
                    continue
                if self._told >= _MOST_EVENTS and not is_last:
                    break
                self._told += 1
                kind.pause_s *= 2
                kind.due_at = now + kind.pause_s
                found += kind.latest if key.message is not None else map(_left_out, kind.latest)
                kind.latest = []
            if is_last and self._untold:
                text = f"{self._untold:,} more warnings and errors of other places were left out"
                found.append(Logged("warning", text, left_out=self._untold))
        return found


def _left_out(latest: Logged) -> Logged:
    """Return a message about those of a place that were left out, given the latest one with their count."""
    (file, line), many = latest.place, latest.count
    noun = {"warning": "warning", "error": "error", "critical": "critical error"}[latest.level]
    text = f"{many:,} more {noun}{'s' if many > 1 else ''} of {os.path.basename(file)}:{line} were left out"
    return Logged(latest.level, text, latest.logger, latest.place, step=latest.step, left_out=many)


class LogCapture:
    """Passes warnings and errors of a run to ``emit``, from :meth:`start` to :meth:`stop`, and all lines to ``keep``.

    It looks at log records as they are made, and changes nothing about loggers and handlers: what the user sees stays
    the same. ``is_ours`` tells whether a worker belongs to the run, given the address of its server. Messages of this
    process belong to every run that is under way. Any thread may log.
    """

    def __init__(
        self,
        emit: Callable[[Logged], None],
        is_ours: Callable[[str], bool],
        keep: Callable[[LineLevel, Logged], None] | None = None,
    ) -> None:
        self._emit = emit
        self._is_ours = is_ours
        self._keep = keep
        self._tally = LogTally()

    def start(self) -> None:
        """Look at log records from now on."""
        _Records.add(self._take)

    def flush(self) -> None:
        """Emit messages that were repeated, if it is time to. Called many times a second."""
        for logged in self._tally.due(time.monotonic()):
            self._emit(logged)

    def stop(self) -> None:
        """Look at no more records, and emit what was counted. May be called more than once."""
        _Records.remove(self._take)
        for logged in self._tally.due(time.monotonic(), is_last=True):
            self._emit(logged)

    def _take(self, record: logging.LogRecord) -> None:
        origin = worker_origin()
        if origin is not None and not self._is_ours(origin.url):
            return
        is_warning = record.levelno >= logging.WARNING
        if not is_warning and self._keep is None:
            return
        logged = _logged(record, origin)
        if self._keep is not None:
            self._keep(_line_level(record.levelno), logged)
        if is_warning and (new := self._tally.add(logged, time.monotonic())) is not None:
            self._emit(new)


def _logged(record: logging.LogRecord, origin: WorkerOrigin | None) -> Logged:
    try:
        message = _without_data(record)
    except Exception:  # the arguments don't fit, or the str() of one raises: logging reports it where it prints
        message = str(record.msg)
    trace = "" if origin is None else origin.traceback
    if record.exc_info:
        trace = "".join(traceback.format_exception(*record.exc_info))
    return Logged(
        _level(record.levelno),
        shorten(mask_text(message.removesuffix(trace.rstrip("\n")).strip()), _MOST_MESSAGE),
        record.name,
        (record.pathname, record.lineno),
        "" if origin is None else origin.worker,
        "" if origin is None else origin.step,
        bounded_traceback(trace) if trace else "",
        whole=hash(message),
    )


def _without_data(record: logging.LogRecord) -> str:
    arguments = record.args
    if not isinstance(arguments, tuple) or not any(isinstance(each, Private) for each in arguments):
        return record.getMessage()
    return str(record.msg) % tuple("" if isinstance(each, Private) else each for each in arguments)


def _level(number: int) -> Level:
    return "critical" if number >= logging.CRITICAL else "error" if number >= logging.ERROR else "warning"


def _line_level(number: int) -> LineLevel:
    return _level(number) if number >= logging.WARNING else "info" if number >= logging.INFO else "debug"


class _Records:
    """Looks at the log records of this process while there is a run: a factory around the one that was there.

    A handler at the root logger would see them, too. But then Python would not print warnings of programs that have not
    set up logging, and a later ``logging.basicConfig`` would do nothing.
    """

    _lock = threading.Lock()
    _sinks: tuple[Callable[[logging.LogRecord], None], ...] = ()
    _inner: Callable[..., logging.LogRecord] = logging.LogRecord
    _was_called = False

    @classmethod
    def add(cls, sink: Callable[[logging.LogRecord], None]) -> None:
        with cls._lock:
            if not cls._is_installed():
                cls._inner = logging.getLogRecordFactory()
                logging.setLogRecordFactory(_make_record)
            cls._sinks = (*cls._sinks, sink)

    @classmethod
    def remove(cls, sink: Callable[[logging.LogRecord], None]) -> None:
        with cls._lock:
            cls._sinks = tuple(each for each in cls._sinks if each != sink)
            # Other code may have put a factory around ours meanwhile; then ours stays below it, and does nothing.
            if not cls._sinks and logging.getLogRecordFactory() is _make_record:
                logging.setLogRecordFactory(cls._inner)

    @classmethod
    def _is_installed(cls) -> bool:
        """Return whether making a record calls our factory, also if another one stands around it."""
        cls._was_called = False
        logging.getLogRecordFactory()(_PROBE, logging.DEBUG, __file__, 0, _PROBE, (), None)
        return cls._was_called

    @classmethod
    def make(cls, *arguments: Any, **named: Any) -> logging.LogRecord:
        record = cls._inner(*arguments, **named)
        if record.name == _PROBE:
            cls._was_called = True
        # ``logging.makeLogRecord`` makes records without a level first.
        elif cls._sinks and record.levelno:
            for sink in cls._sinks:
                sink(record)
        return record


def _make_record(*arguments: Any, **named: Any) -> logging.LogRecord:
    return _Records.make(*arguments, **named)
