"""Advisory locks on open files and folders, between the processes and threads of one machine.

The kernel releases a lock when its holder dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import random
import time
from collections.abc import Generator

__all__ = ["locked", "try_lock", "unlock"]

_POLL_S = 0.02  # short beside any work done under a lock, long enough to cost no CPU time


def try_lock(descriptor: int, shared: bool = False) -> bool:
    """Take the lock of an open file if it is free now; return whether it was taken."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def unlock(descriptor: int) -> None:
    """Release the lock. Closing the file is not enough where a forked child has it open, too."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def locked(descriptor: int, timeout_s: float, poll_s: float = _POLL_S) -> Generator[None]:
    """Hold the lock of an open file alone.

    Raises ``TimeoutError`` if another holder keeps it for ``timeout_s`` seconds. ``poll_s`` is the time between two
    attempts.
    """
    deadline = time.monotonic() + timeout_s
    while not try_lock(descriptor):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.3g} s for a lock")
        time.sleep(poll_s * random.uniform(0.5, 1.5))
    try:
        yield
    finally:
        unlock(descriptor)
