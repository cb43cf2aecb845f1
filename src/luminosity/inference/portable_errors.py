"""Errors that come from another process, with what was known there."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

from apache_beam.internal.cloudpickle import cloudpickle

__all__ = ["Travelling", "packed", "unpacked"]

_SCRIPT = b"__main__"


class Travelling(Exception):
    """An error within a message: pickled as itself, it arrives as the error, with what was known here."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self._packed = packed(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return unpacked, (self._packed,)


def packed(error: BaseException) -> bytes:
    """The error as bytes; where it can't travel, its class and text do."""
    trace = "".join(traceback.format_exception(error))
    try:
        answer = _dumps((error, trace))
        pickle.loads(answer)  # Some can be written and not read: their __init__ wants other arguments.
    except Exception:
        answer = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return answer


def _dumps(value: Any) -> bytes:
    """With the definition of a class of the user's script, which the other process does not find by its name."""
    try:
        data = pickle.dumps(value)
        if _SCRIPT not in data:
            return data
    except (pickle.PicklingError, AttributeError):
        pass  # A class without a name to find it by.
    return cloudpickle.dumps(value)


def unpacked(answer: bytes) -> BaseException:
    """
    >>> unpacked(packed(ValueError("seven")))
    ValueError('seven')
    """
    error, trace = pickle.loads(answer)
    error.__cause__ = RuntimeError(f"in the process of the model:\n{trace}")
    return error
