"""Failures in workers, described for the user: exception, step, line of code, element and remedy.

An element is the user's own data, shortened, whatever object holds it on its way.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import Any, cast

from apache_beam.transforms import core
from apache_beam.utils.windowed_value import WindowedValue

from luminosity._shared.notebook import cell_line
from luminosity._shared.record_places import take_left
from luminosity._shared.text import shorten, shorten_repr
from luminosity._shared.user_code import fold, is_installed, is_users, is_users_file
from luminosity.core import ELEMENT_AT_FAULT, REMEDY, USER_DATA
from luminosity.engine.process import describe_limits
from luminosity.errors import BlockLost, Fix, LuminosityError, SpillFailed, may_pass
from luminosity.runs.manifest.masking import mask_text

__all__ = [
    "Failure",
    "describe_element",
    "describe_input",
    "describe_location",
    "element_of",
    "from_users_code_on",
    "is_of_main",
    "location_of",
    "original",
    "user_traceback",
]

_BEAM_TRANSFORMS = core.__file__  # has the wrappers around functions of users
_STEP = re.compile(r"\[while running '(.*?)'\]")
_TAG = re.compile(r" ?\[while running '.*?'\]")
_TRACEBACK_HEADING = "Traceback (most recent call last)"
_TRACEBACK_LINE = re.compile(r'File "([^"\n]+)", line (\d+)')
_ELEMENT_CHARACTERS = 200  # of an element's repr: enough to recognize it, short enough for a message
_MOST_VALUES = 20  # of a collection: more don't fit into the characters
_MOST_ROWS = 3  # of a table
_DEEPEST = 6  # levels of collections within collections


@dataclass(frozen=True)
class Failure:
    """An exception in a worker, as text without secrets, so that it can cross to the runner's process."""

    exception: str  # type and message, without the remedy
    traceback: str  # the whole traceback, without the remedy
    step: str = ""
    location: str = ""  # file and line of the user's code
    element: str = ""  # as describe_element shortens it
    record: str = ""  # the place of the record that was being processed, such as reviews[3]@1204, if a source named it
    fix: Fix | None = None  # the remedy, if the exception has one
    shown: str = ""  # the traceback without frames of Beam's and ours, if the worker has shortened it
    may_pass: bool = True  # whether another attempt may succeed, see luminosity.errors.may_pass

    @property
    def is_full_disk(self) -> bool:
        """True if the worker could not spill because the disk is full."""
        return self.exception.startswith(f"{SpillFailed.__name__}: ")

    @property
    def is_lost_block(self) -> bool:
        """True if no copy of the bundle's input could be read: nodes of a cluster are gone, or do not answer."""
        return self.exception.startswith(f"{BlockLost.__name__}: ")

    def to_json(self) -> str:
        """Return the failure as JSON, for the ``error`` field of a worker's response."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """Read what :meth:`to_json` returned, or a plain traceback, as Beam's own code reports it."""
        try:
            fields = dict(json.loads(text))
            fix = fields.pop("fix", None)
            return cls(**fields, fix=Fix(**fix) if fix else None)
        except (ValueError, TypeError):
            text = mask_text(text)
            lines = text.strip().splitlines()
            return cls(exception=lines[-1] if lines else "unknown error", traceback=text)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception that was raised while a bundle ran. Call it in the process that raised."""
        first = original(error)
        _drop_repetition(error)
        step = _STEP.search(str(error))
        frames = _frames(error.__traceback__)
        text, message, fix = str(first), str(first), getattr(first, REMEDY, None)
        if isinstance(first, LuminosityError):
            message, fix = first.message, first.fix or fix
        if isinstance(first, MemoryError) and fix is None and (limits := describe_limits()):
            fix = _of_memory(limits)
        message = _STEP.sub("", message).strip()
        name = type(first).__name__
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        trace = trace.replace(text, message) if fix is not None else trace
        shown = fold("".join(traceback.format_exception(first)) if first is not error else trace)
        shown = shown.replace(text, message) if fix is not None else shown
        elsewhere = _location_elsewhere(first)
        return cls(
            exception=mask_text(f"{name}: {message}" if message else name),
            traceback=mask_text(trace),
            shown=mask_text(_TAG.sub("", shown).rstrip()),
            step=step.group(1) if step else "",
            location=elsewhere or location_of(frames),
            element=str(getattr(first, ELEMENT_AT_FAULT, "")) or element_of(frames),
            record=take_left(),
            fix=fix,
            may_pass=may_pass(first, in_user_code=bool(elsewhere) or any(is_users(frame) for frame, _ in frames)),
        )


def _of_memory(limits: str) -> Fix:
    advice = f"a process may use {limits}: raise the limit, or use fewer or smaller elements at once"
    return Fix(advice, command=advice)


def original(error: BaseException) -> BaseException:
    """Return what user code raised. Beam re-raises it with the step's name, as the same type or as RuntimeError."""
    if getattr(error, "_tagged_with_step", False) and error.__context__ is not None:
        return error.__context__
    return error


def _drop_repetition(error: BaseException) -> None:
    """Unlink the exception that Beam re-raised with the step's name: it has the same frames once more."""
    first = original(error)
    if first is not error and type(first) is type(error):
        if "__notes__" in vars(first):
            vars(error)["__notes__"] = vars(first)["__notes__"]
        error.__context__ = first.__context__
        error.__cause__ = error.__cause__ if error.__cause__ is not first else first.__cause__


def _frames(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    return [(frame, line) for frame, line in traceback.walk_tb(trace)]


def user_traceback(error: BaseException) -> tuple[TracebackType | None, int]:
    """Return the traceback from the first frame of the user's code on, and the number of frames below its last one."""
    trace = error.__traceback__
    frames = _frames(trace)
    users = [i for i, (frame, _) in enumerate(frames) if is_users(frame)]
    if not users:
        return trace, 0
    for _ in range(users[0]):
        trace = trace.tb_next if trace is not None else None
    return trace, len(frames) - 1 - users[-1]


def is_of_main(error: BaseException) -> bool:
    """Return whether code of the script itself raised it, which is pickled by value, rather than an imported module."""
    users = [frame for frame, _ in _frames(error.__traceback__) if is_users(frame)]
    return bool(users) and users[-1].f_globals.get("__name__") == "__main__"


def from_users_code_on(frames: list[tuple[FrameType, int]]) -> list[tuple[FrameType, int]]:
    """Return the frames from the first one of the user's code on; all of them if none is the user's."""
    first = next((place for place, (frame, _) in enumerate(frames) if is_users(frame)), 0)
    return frames[first:]


def location_of(frames: list[tuple[FrameType, int]]) -> str:
    """Return the innermost line of the user's code, or else of an installed package."""
    for frame, line in reversed(frames):
        if is_users(frame):
            return f"{frame.f_code.co_filename}:{line}"
    for frame, line in reversed(frames):
        path = frame.f_code.co_filename
        if is_installed(path):
            return f"{path}:{line}"
    return ""


def _location_elsewhere(error: BaseException) -> str:
    """Return the innermost line of the user's code in the process that raised the error, if that is another one.

    That process has sent its traceback as text: in the error's notes or message, or as the error's cause, as
    ``concurrent.futures`` and our model hosts do.
    """
    texts = [*getattr(error, "__notes__", ()), str(error)]
    if error.__cause__ is not None and error.__cause__.__traceback__ is None:
        texts.append(str(error.__cause__))  # never raised here, so it only carries text
    for text in texts:
        if _TRACEBACK_HEADING in text:
            for path, line in reversed(_TRACEBACK_LINE.findall(text)):
                if path != "<string>" and is_users_file(path):
                    return f"{path}:{line}"
    return ""


def element_of(frames: list[tuple[FrameType, int]]) -> str:
    """Return the element that the step got: the first argument of the outermost call into the user's code.

    If no user code runs, as when a coder fails, return the element that Beam's own input or output step holds.
    """
    caller: FrameType | None = None
    for frame, _ in frames:
        if is_users(frame):
            if caller is not None and caller.f_code.co_filename == _BEAM_TRANSFORMS and "x" in caller.f_locals:
                return describe_element(caller.f_locals["x"])  # Map, MapTuple: the function may get parts of it
            code = frame.f_code
            names = [n for n in code.co_varnames[: code.co_argcount] if n not in ("self", "cls")]
            if code.co_name == "add_input" and len(names) > 1:
                names = names[1:]  # a CombineFn's first argument is its accumulator
            if names and names[0] in frame.f_locals:
                return describe_element(frame.f_locals[names[0]])
        caller = frame
    for frame, _ in reversed(frames):
        for name in ("windowed_value", "decoded_value"):
            value = frame.f_locals.get(name)
            if isinstance(value, WindowedValue):
                return describe_input(value.value)
    return ""


def describe_location(location: str) -> str:
    """Return ``location``, a file and a line, as the user knows it: by the cell's number in a notebook."""
    path, _, line = location.rpartition(":")
    return cell_line(path, line) or location


def describe_element(value: Any, limit: int = _ELEMENT_CHARACTERS) -> str:
    """Return one line about an element.

    Like ``repr``, but iterables of Beam are lists of their values, tables are rows, and objects of the product that
    carry elements are what they carry.

    >>> import pyarrow as pa
    >>> describe_element(("key", [1, 2])), describe_element(pa.table({"text": ["a", "b", "c", "d"]}))
    ("('key', [1, 2])", "4 rows: {'text': 'a'}, {'text': 'b'}, {'text': 'c'}, …")
    """
    text = _described(value, limit, _DEEPEST)
    return shorten(" ".join(text.split()) if "\n" in text else text, limit)


def describe_input(value: Any) -> str:
    """Return one line about what a step gets from the runner.

    For a splittable DoFn, Beam packs the element with its restriction, and their size; only these two are shown. The
    element of an Impulse, with which a pipeline begins, is not the user's: an empty string.
    """
    match value:
        case b"":
            return ""
        case ((element, (restriction, _)), float()) if type(restriction).__module__ != "builtins":
            part = shorten_repr(restriction, _ELEMENT_CHARACTERS)
            return describe_element(element) + (f", {part}" if " object at 0x" not in part else "")
        case _:
            return describe_element(value)


def _described(value: Any, limit: int, depth: int) -> str:
    carried = getattr(type(value), USER_DATA, None)
    if carried is not None:
        return _described(carried(value), limit, depth)
    pa = sys.modules.get("pyarrow")  # not imported here: who has no tables does not need it
    if pa is not None and isinstance(value, pa.RecordBatch | pa.Table):
        return _rows(value)
    kind = type(value)
    if depth and kind is dict:
        pairs = _some(value.items(), lambda pair: ": ".join(_described(each, limit, depth - 1) for each in pair))
        return f"{{{pairs}}}"
    if depth and kind in (list, tuple):
        inner = _some(value, lambda each: _described(each, limit, depth - 1))
        return f"[{inner}]" if kind is list else f"({inner}{',' if len(value) == 1 else ''})"
    if kind.__module__.startswith("apache_beam.") and " object at 0x" in shorten_repr(value, limit):
        return _of_beam(value, limit, depth)
    return shorten_repr(value, limit)


def _some(values: Iterable[Any], describe: Callable[[Any], str]) -> str:
    found = list(itertools.islice(values, _MOST_VALUES + 1))
    texts = [describe(each) for each in found[:_MOST_VALUES]]
    return ", ".join([*texts, *(["…"] if len(found) > _MOST_VALUES else [])])


def _of_beam(value: Any, limit: int, depth: int) -> str:
    """Describe an object of Beam's without a ``repr``: the values of an iterable, the files of a source."""
    pattern = getattr(value, "_pattern", None)
    if pattern is not None:
        return f"files {pattern.get() if hasattr(pattern, 'get') else pattern!r}"
    if depth and isinstance(value, Iterable):
        try:
            values = cast("Iterable[Any]", value)
            return f"[{_some(values, lambda each: _described(each, limit, depth - 1))}]"
        except Exception as error:  # the values may lie with the runner, and the bundle has failed
            return f"<values that can't be read: {type(error).__name__}>"
    return shorten_repr(value, limit)


def _rows(table: Any) -> str:
    shown = ", ".join(shorten_repr(row, _ELEMENT_CHARACTERS) for row in table.slice(0, _MOST_ROWS).to_pylist())
    if table.num_rows == 1:
        return f"1 row: {shown}"
    return f"{table.num_rows:,} rows: {shown}{', …' if table.num_rows > _MOST_ROWS else ''}" if shown else "0 rows"
