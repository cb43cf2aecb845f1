"""Errors that come from another process, with what was known there."""

from __future__ import annotations

import pickle
import traceback

__all__ = ["packed", "unpacked"]


def packed(error: BaseException) -> bytes:
    """The error as bytes; where it can't travel, its class and text do."""
    trace = "".join(traceback.format_exception(error))
    try:
        answer = pickle.dumps((error, trace))
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
