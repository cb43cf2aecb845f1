"""Jobs of this machine take turns where they look at a folder, and then put something into it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Generator

__all__ = ["turn_in"]

_POLL_S = 0.02


@contextlib.contextmanager
def turn_in(folder: str, seconds: float) -> Generator[None]:
    """Nobody else has a turn in this folder meanwhile; `TimeoutError` where somebody has it for so long.

    The kernel ends the turn of who dies. Nobody waits where that is no folder of this machine, or its file system has
    no such locks.
    """
    descriptor = _opened(folder)
    if descriptor is None:
        yield
        return
    try:
        is_locked = _take(descriptor, folder, seconds)
        try:
            yield
        finally:
            if is_locked:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # Closing alone would not do where a forked child has it open.
    finally:
        os.close(descriptor)


def _opened(folder: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return None


def _take(descriptor: int, folder: str, seconds: float) -> bool:
    give_up_at = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                return False
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"waited {seconds:.3g} s for another job that puts its files into {folder}")
        time.sleep(_POLL_S)
