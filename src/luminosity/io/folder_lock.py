"""A lock on a folder, for jobs on one machine that look at a folder and then put files into it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Generator

from luminosity._shared.locks import locked

__all__ = ["lock_folder"]

_LOGGER = logging.getLogger(__name__)


@contextlib.contextmanager
def lock_folder(folder: str, timeout_s: float) -> Generator[None]:
    """Hold the lock of a folder. Raises ``TimeoutError`` if another job keeps it for ``timeout_s`` seconds.

    Nothing is locked if the folder is not on this machine, or if its file system has no locks.
    """
    with contextlib.ExitStack() as held:
        descriptor = _open(folder)
        if descriptor is not None:
            held.callback(os.close, descriptor)
            try:
                held.enter_context(locked(descriptor, timeout_s))
            except TimeoutError:
                raise TimeoutError(
                    f"waited {timeout_s:.3g} s for another job that puts its files into {folder}"
                ) from None
            except OSError as error:
                _LOGGER.debug("can't lock %s: %s", folder, error)
        yield


def _open(folder: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return None
