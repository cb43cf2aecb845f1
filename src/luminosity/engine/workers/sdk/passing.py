"""Passes elements by at which a step of the user fails, and describes them: what ``--dead_letters`` asks of workers.

The runner asks for it when a bundle has failed as often as it may. In that attempt, an element at which ``process`` of
a step raises makes no output, and a letter about it goes to the runner with the bundle's response.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import pickle
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timezone
from types import MethodType
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners import common
from apache_beam.transforms import core

from luminosity._shared.record_places import place_now
from luminosity._shared.user_code import is_users
from luminosity.core import ONLY_UNPACKS
from luminosity.engine.data import wire
from luminosity.engine.workers.failure import Failure, describe_element
from luminosity.errors import StepFailed

__all__ = ["letter_line", "measure_with_letters", "pass_failing_elements_by"]

_MOST_SHOWN = 10_000  # characters of an element, and of a traceback
_MOST_PICKLED = 100_000  # bytes of an element; of a larger one, a letter has only the description
_MOST_BYTES = 32_000_000  # of the letters of one bundle, which travel in one message

_Response = beam_fn_api_pb2.InstructionResponse


class _Letters:
    """The letters of a bundle."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self._size = 0

    def add(self, step: str, element: Any, error: Exception, failure: Failure) -> None:
        line = letter_line(step, element, failure)
        self._size += len(line)
        if self._size > _MOST_BYTES:
            raise StepFailed(f"the dead letters of one bundle take more than {_MOST_BYTES:,} bytes") from error
        self.lines.append(line)


_local = threading.local()  # its ``letters`` are those of the bundle that runs on a thread, if elements are passed by


def letter_line(step: str, element: Any, failure: Failure) -> bytes:
    """Return a letter as a line of JSON. The same failure of the same element always has the same id."""
    try:
        pickled = pickle.dumps(element, 5)
    except Exception:  # of any type: the element is the user's
        pickled = b""
    shown = describe_element(element, _MOST_SHOWN)
    digest = hashlib.sha256(b"\0".join((step.encode(), pickled or shown.encode(), failure.exception.encode())))
    letter = {
        "id": digest.hexdigest()[:16],
        "at": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "step": step,
        "exception": failure.exception,
        "place": failure.location,
        "record": failure.record,
        "element": shown,
        "pickle": base64.b64encode(pickled).decode() if 0 < len(pickled) <= _MOST_PICKLED else None,
        "traceback": (failure.shown or failure.traceback)[-_MOST_SHOWN:],
    }
    return json.dumps(letter).encode() + b"\n"


def measure_with_letters(
    measure: Callable[[Callable[[], _Response]], _Response], instruction_id: str, run: Callable[[], _Response]
) -> _Response:
    """Run a bundle, and add the letters about elements that were passed by to its response."""
    if not instruction_id.startswith(wire.PASSING_PREFIXES):
        return measure(run)
    letters = _local.letters = _Letters()
    try:
        response = measure(run)
    finally:
        _local.letters = None
    if letters.lines:
        response.process_bundle.monitoring_data[wire.LETTERS] = b"".join(letters.lines)
    return response


def pass_failing_elements_by() -> None:
    """Change how Beam's worker calls steps, in this process. Call it before any step is set up."""
    make: Any = common.DoFnRunner
    if getattr(make, "passes_by", False):
        return

    def make_passing(fn: core.DoFn, *args: Any, **kwargs: Any) -> Any:
        _, defaults = core.get_function_arguments(fn, "process")
        # A source goes on where it failed: to pass its element by would lose all that it has not read yet.
        is_source = any(isinstance(default, core.DoFn.RestrictionParam) for default in defaults)
        if not is_source and not getattr(fn, ONLY_UNPACKS, False):
            setattr(fn, "process", _passing(fn.process, str(kwargs.get("step_name", ""))))  # noqa: B010
        return make(fn, *args, **kwargs)

    setattr(make_passing, "passes_by", True)  # noqa: B010
    setattr(common, "DoFnRunner", make_passing)  # noqa: B010


def _passing(process: Callable[..., Any], step: str) -> Callable[..., Any]:
    """Return ``process`` so that it passes elements by. A method stays one: Beam looks for state in methods only."""
    if isinstance(process, MethodType):
        return MethodType(_passing_function(process.__func__, step, 1), process.__self__)
    return _passing_function(process, step, 0)


def _passing_function(process: Callable[..., Any], step: str, place: int) -> Callable[..., Any]:
    @functools.wraps(process)
    def passing(*args: Any, **kwargs: Any) -> Any:
        letters: _Letters | None = getattr(_local, "letters", None)
        if letters is None:
            return process(*args, **kwargs)
        try:
            results = process(*args, **kwargs)
            # All or nothing: an element that fails has no output.
            return list(results) if isinstance(results, Iterable) and not _is_refused(results) else results
        except Exception as error:
            if not any(is_users(frame) for frame, _ in traceback.walk_tb(error.__traceback__)):
                raise
            failure = Failure.of(error)
            if not failure.may_pass:
                raise
            failure = replace(failure, record=place_now())  # the source goes on: it has not failed
            letters.add(step, args[place] if len(args) > place else None, error, failure)
            return None

    return passing


def _is_refused(results: Any) -> bool:
    """Return whether Beam refuses what a step returns, although it is iterable."""
    return isinstance(results, str | bytes | dict)
