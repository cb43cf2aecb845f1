"""Errors that come from another process, with what was known there."""

from __future__ import annotations

import math
import pickle
import traceback
from typing import Any

from luminosity.inference.ipc.pickling import pickled

__all__ = ["Travelling", "packed", "unpacked"]


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
        answer, _ = pickled((error, trace), apart_from=math.inf)
        pickle.loads(answer)  # Some can be written and not read: their __init__ wants other arguments.
    except Exception:
        answer = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return answer


def unpacked(answer: bytes) -> BaseException:
    """
    >>> unpacked(packed(ValueError("seven")))
    ValueError('seven')
    """
    error, trace = pickle.loads(answer)
    error.__cause__ = RuntimeError(f"in the process of the model:\n{trace}")
    return error
