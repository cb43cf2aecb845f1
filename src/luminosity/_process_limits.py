"""Limits that the shell or the system sets for a process (``ulimit``), named in errors that they cause."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Generator

from luminosity._text import format_bytes
from luminosity.errors import Fix, ResourcesExceeded

__all__ = ["check_address_space", "describe_limits", "limits_named"]

_LEAST_ADDRESS_SPACE = 2_000_000_000  # bytes: libraries, thread stacks and buffers of a process that runs a pipeline
_MEMORY = {resource.RLIMIT_AS: ("address space", "v"), resource.RLIMIT_DATA: ("data", "d")}
_KIB = 1024  # the unit of ulimit
_FIX = "raise the limit in the shell that starts this: ulimit -v unlimited"


def describe_limits() -> str:
    """Return the limits of this process's memory and threads in words, or an empty string if there are none."""
    found = [
        f"{format_bytes(soft)} of {name} (ulimit -{option} {soft // _KIB})"
        for number, (name, option) in _MEMORY.items()
        if (soft := resource.getrlimit(number)[0]) != resource.RLIM_INFINITY
    ]
    return " and ".join(found)


def check_address_space() -> None:
    """Raise ``ResourcesExceeded`` if this process's address space is too small to run a pipeline.

    Threads that can't start in libraries below would make a run hang, or end it with a traceback about something else.
    """
    if 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < _LEAST_ADDRESS_SPACE:
        raise ResourcesExceeded(
            f"a process may use {describe_limits()}, expected at least {format_bytes(_LEAST_ADDRESS_SPACE)}",
            fix=Fix(_FIX, command=_FIX),
        )


@contextlib.contextmanager
def limits_named() -> Generator[None]:
    """Turn errors of a process that has no memory left for data, threads or libraries into ``ResourcesExceeded``.

    Only if a limit of this process may be the reason; otherwise they stay as they are.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        limits = describe_limits() if _is_for_lack_of_memory(error) else ""
        if not limits:
            raise
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ResourcesExceeded(
            f"there is no memory left ({what}): a process may use {limits}", fix=Fix(_FIX, command=_FIX)
        ) from error


def _is_for_lack_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory could not be allocated.

    >>> _is_for_lack_of_memory(RuntimeError("can't start new thread")), _is_for_lack_of_memory(RuntimeError("no"))
    (True, False)
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    text = str(error)
    if isinstance(error, ImportError):
        return "failed to map segment" in text or "annot allocate memory" in text
    return type(error) is RuntimeError and "can't start new thread" in text
