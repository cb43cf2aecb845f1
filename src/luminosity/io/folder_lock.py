"""Jobs of this machine take turns where they look at a folder, and then put something into it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Generator

from luminosity._locks import locked

__all__ = ["lock_folder"]

_LOGGER = logging.getLogger("luminosity")


@contextlib.contextmanager
def lock_folder(folder: str, seconds: float) -> Generator[None]:
    """Nobody else has a turn in this folder meanwhile; `TimeoutError` where somebody has it for so long.

    Nobody waits where that is no folder of this machine, or its file system has no such locks.
    """
    with contextlib.ExitStack() as turn:
        descriptor = _opened(folder)
        if descriptor is not None:
            turn.callback(os.close, descriptor)
            try:
                turn.enter_context(locked(descriptor, seconds))
            except TimeoutError:
                raise TimeoutError(
                    f"waited {seconds:.3g} s for another job that puts its files into {folder}"
                ) from None
            except OSError as error:
                _LOGGER.debug("jobs take no turns in %s: %s", folder, error)
        yield


def _opened(folder: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return None
