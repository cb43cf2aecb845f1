"""A failure in a worker, described so that a person can act on it."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
import traceback
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import Any

import apache_beam
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.core import ELEMENT_AT_FAULT
from luminosity.errors import SpillFailed

ELEMENT_CHARACTERS = 200

_BEAM_DIRECTORY = os.path.dirname(apache_beam.__file__) + os.sep
_OUR_DIRECTORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_STANDARD_LIBRARY = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})  # may be below the former
_STEP = re.compile(r"\[while running '(.*?)'\]")

_TRACEBACK_LINE = re.compile(r'File "([^"\n]+)", line (\d+)')


@dataclass(frozen=True)
class Failure:
    """What went wrong in a worker, as text: it crosses a process."""

    exception: str  # type and message
    traceback: str  # whole
    step: str = ""
    location: str = ""  # the user's own file and line
    element: str = ""  # at most ELEMENT_CHARACTERS of its repr

    @property
    def is_full_disk(self) -> bool:
        return self.exception.startswith(f"{SpillFailed.__name__}: ")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """Also takes a plain traceback, which is what Beam's own code reports."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            lines = text.strip().splitlines()
            return cls(exception=lines[-1] if lines else "unknown error", traceback=text)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        first = original(error)
        _drop_repetition(error)
        step = _STEP.search(str(error))
        frames = _frames(error.__traceback__)
        message = _STEP.sub("", str(first)).strip()
        name = type(first).__name__
        return cls(
            exception=f"{name}: {message}" if message else name,
            traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            step=step.group(1) if step else "",
            location=_location(frames),
            element=str(getattr(first, ELEMENT_AT_FAULT, "")) or _element(frames),
        )


def original(error: BaseException) -> BaseException:
    """What user code raised. Beam raises it again with the step's name, as the same type or as a RuntimeError."""
    if getattr(error, "_tagged_with_step", False) and error.__context__ is not None:
        return error.__context__
    return error


def _drop_repetition(error: BaseException) -> None:
    """What Beam raised again has the same frames twice, of which once is enough."""
    first = original(error)
    if first is not error and type(first) is type(error):
        error.__context__ = first.__context__
        error.__cause__ = error.__cause__ if error.__cause__ is not first else first.__cause__


def shorten(value: Any) -> str:
    """The beginning of ``repr(value)``."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= ELEMENT_CHARACTERS else text[: ELEMENT_CHARACTERS - 1] + "…"


def _frames(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    return [(frame, line) for frame, line in traceback.walk_tb(trace)]


def user_traceback(error: BaseException) -> tuple[TracebackType | None, int]:
    """The traceback from where it comes to the user's code, and how many of its frames are below that code's last."""
    trace = error.__traceback__
    frames = _frames(trace)
    users = [i for i, (frame, _) in enumerate(frames) if _is_users(frame)]
    if not users:
        return trace, 0
    for _ in range(users[0]):
        trace = trace.tb_next if trace is not None else None
    return trace, len(frames) - 1 - users[-1]


def is_of_main(error: BaseException) -> bool:
    """Whether the user's code that raised it is of the script itself, which is pickled whole and not by name."""
    users = [frame for frame, _ in _frames(error.__traceback__) if _is_users(frame)]
    return bool(users) and users[-1].f_globals.get("__name__") == "__main__"


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not _is_runners(path) and not path.startswith((*_STANDARD_LIBRARY, *_INSTALLED))


def _is_runners(path: str) -> bool:
    return path.startswith((_BEAM_DIRECTORY, _OUR_DIRECTORY, "<frozen", "apache_beam/"))


def _location(frames: list[tuple[FrameType, int]]) -> str:
    """The innermost line of the user's own code."""
    for frame, line in reversed(frames):
        if _is_users(frame):
            return f"{frame.f_code.co_filename}:{line}"
    for frame, line in reversed(frames):
        path = frame.f_code.co_filename
        if path.startswith(_INSTALLED) and not _is_runners(path):
            return f"{path}:{line}"
    return ""


def _element(frames: list[tuple[FrameType, int]]) -> str:
    """What the step was given: the first argument of the outermost call into the user's code.

    Where no user code runs (a coder fails), it is the element that Beam's own input or output step holds.
    """
    for frame, _ in frames:
        if _is_users(frame):
            code = frame.f_code
            names = [n for n in code.co_varnames[: code.co_argcount] if n not in ("self", "cls")]
            if code.co_name == "add_input" and len(names) > 1:
                names = names[1:]  # a CombineFn's first argument is its accumulator
            if names and names[0] in frame.f_locals:
                return shorten(frame.f_locals[names[0]])
    for frame, _ in reversed(frames):
        for name in ("windowed_value", "decoded_value"):
            value = frame.f_locals.get(name)
            if isinstance(value, WindowedValue):
                return shorten(value.value)
    return ""


def name_cells(text: str) -> str:
    """``text`` with each ``File "…", line 2`` that is in a cell written as ``Cell In[3], line 2``."""
    return _TRACEBACK_LINE.sub(lambda found: _cell_line(found[1], found[2]) or found[0], text)


def describe_location(location: str) -> str:
    """``location``, which is a file and a line, as a person knows it."""
    path, _, line = location.rpartition(":")
    return _cell_line(path, line) or location


def _cell_line(path: str, line: str) -> str:
    ipython: Any = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    label = shell and shell.compile.format_code_name(path)  # None where it is not a cell's
    return f"{' '.join(label)}, line {line}" if label else ""
