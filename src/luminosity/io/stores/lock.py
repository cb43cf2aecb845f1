"""One process of this machine at a time, and who it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

from luminosity._locks import locked
from luminosity.errors import StoreError

__all__ = ["held"]


@contextlib.contextmanager
def held(path: str, timeout: float) -> Generator[None]:
    """Hold the lock of that file, for which threads and processes alike wait so many seconds at most."""
    with contextlib.ExitStack() as lock:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        lock.callback(os.close, descriptor)
        try:
            lock.enter_context(locked(descriptor, timeout))
        except TimeoutError:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
            raise StoreError(
                f"waited {timeout:.3g} s for {path}, which process {holder} holds; is that one stopped, or still at "
                "work? More workers than the store can serve need a longer timeout, or a server"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
