"""The names of a user's functions in messages, and their places in the source."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["name_of", "place_of"]


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of a callable object.

    >>> name_of(functools.partial(len)), name_of(lambda batch: batch)
    ('len', '<lambda>')
    """
    inner = _function(fn)
    return getattr(inner, "__name__", type(inner).__name__)


def place_of(fn: Callable[..., Any], error: BaseException | None = None) -> str:
    """Return file and line: of the line in the function that raised ``error``, otherwise of its first line."""
    inner = _function(fn)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    if code is None:
        return "not written in Python"
    line = code.co_firstlineno
    if error is not None:
        lines = [at for frame, at in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
        line = lines[-1] if lines else line
    return f"{code.co_filename}:{line}"


def _function(fn: Any) -> Any:
    return _function(fn.func) if isinstance(fn, functools.partial) else getattr(fn, "__func__", fn)
