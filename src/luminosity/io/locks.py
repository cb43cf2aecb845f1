"""Locks of open files and folders, between processes and threads of this machine. The kernel frees them at a death."""

from __future__ import annotations

import contextlib
import fcntl
import random
import time
from collections.abc import Generator

__all__ = ["locked"]

_POLL_S = 0.02


@contextlib.contextmanager
def locked(descriptor: int, seconds: float) -> Generator[None]:
    """Nobody else has it meanwhile; `TimeoutError` where somebody has it for so long."""
    give_up_at = time.monotonic() + seconds
    while not _is_taken(descriptor):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"waited {seconds:.3g} s for a lock")
        time.sleep(_POLL_S * random.uniform(0.5, 1.5))
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # Closing alone would not do where a forked child has it open.


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
