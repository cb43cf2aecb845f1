"""One process of this machine at a time. The kernel frees the lock when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import time
from collections.abc import Generator

from luminosity.errors import StoreError

__all__ = ["held"]

_POLL_S = 0.02


@contextlib.contextmanager
def held(path: str, timeout: float) -> Generator[None]:
    """Hold the lock of that file, for which threads and processes alike wait so many seconds at most."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        _take(descriptor, path, timeout)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # Closing alone would not do where a forked child has it open.
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: str, timeout: float) -> None:
    give_up_at = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > give_up_at:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
                raise StoreError(
                    f"waited {timeout:.3g} s for {path}, which process {holder} holds; is that one stopped, or still "
                    "at work? More workers than the store can serve need a longer timeout, or a server"
                ) from None
        time.sleep(_POLL_S * random.uniform(0.5, 1.5))
