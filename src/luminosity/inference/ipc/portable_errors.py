"""Errors that travel to another process, with their traceback as text."""

from __future__ import annotations

import math
import pickle
import traceback
from typing import Any

from luminosity.inference.ipc.pickling import pickle_with_buffers

__all__ = ["PortableError", "pack_error", "unpack_error"]


class PortableError(Exception):
    """Wraps an error inside a message: it is pickled as the packed error and unpickled as the error itself."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self._packed = pack_error(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack_error, (self._packed,)


def pack_error(error: BaseException) -> bytes:
    """Return the error as bytes; an error that can't be pickled becomes a ``RuntimeError`` with its class and text."""
    trace = "".join(traceback.format_exception(error))
    try:
        packed, _ = pickle_with_buffers((error, trace), apart_from=math.inf)
        pickle.loads(packed)  # Some errors can be pickled and not unpickled: their __init__ needs other arguments.
    except Exception:
        packed = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return packed


def unpack_error(packed: bytes) -> BaseException:
    """Return the error that was packed; its cause holds the traceback of the other process.

    >>> unpack_error(pack_error(ValueError("seven")))
    ValueError('seven')
    """
    error, trace = pickle.loads(packed)
    error.__cause__ = RuntimeError(f"in the process of the model:\n{trace}")
    return error
