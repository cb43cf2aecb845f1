"""Locks between processes that wait with progress messages. The kernel releases a lock when its holder dies."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Generator

from luminosity._shared.shared_files import try_lock, unlock
from luminosity.errors import ModelUnavailable

__all__ = ["exclusive", "shared", "try_exclusive"]

_LOGGER = logging.getLogger(__name__)

_POLL_S = 0.05  # short beside a download, long enough to cost no CPU time
_FIRST_MESSAGE_S = 10.0  # shorter waits need no message
_MESSAGE_EVERY_S = 60.0
_CHECK_EVERY_S = 1.0  # how often the holder's progress is measured, which lists files
_LONGEST_STANDSTILL_S = 600.0  # a holder without progress for this long is stuck

_held_exclusively: set[int] = set()


def shared(path: str, waiting_for: str) -> int:
    """Take a shared lock until the returned descriptor is closed or the process ends."""
    return _acquire(path, True, waiting_for, lambda: 0)


@contextlib.contextmanager
def exclusive(path: str, waiting_for: str, progress: Callable[[], int] = lambda: 0) -> Generator[None]:
    """Hold the lock exclusively.

    Raises ``ModelUnavailable`` if the ``progress`` of the holder does not change for ten minutes.
    """
    with _holding(_acquire(path, False, waiting_for, progress)):
        yield


@contextlib.contextmanager
def try_exclusive(path: str) -> Generator[bool]:
    """Hold the lock exclusively if it is free now; yield whether it is held."""
    descriptor = _open(path)
    if not _take(descriptor, shared=False) or not _is_current(path, descriptor):
        os.close(descriptor)
        yield False
        return
    with _holding(descriptor):
        yield True


@contextlib.contextmanager
def _holding(descriptor: int) -> Generator[None]:
    _held_exclusively.add(descriptor)
    try:
        yield
    finally:
        _held_exclusively.discard(descriptor)
        unlock(descriptor)
        os.close(descriptor)


def _acquire(path: str, shared: bool, waiting_for: str, progress: Callable[[], int]) -> int:
    began = moved = time.monotonic()
    message_at = began + _FIRST_MESSAGE_S
    check_at, seen = began, -1
    while True:
        descriptor = _open(path)
        if _take(descriptor, shared) and _is_current(path, descriptor):
            return descriptor
        os.close(descriptor)
        now = time.monotonic()
        if now >= message_at:
            _LOGGER.info("waiting for %s for %.0f s: another worker holds %s", waiting_for, now - began, path)
            message_at = now + _MESSAGE_EVERY_S
        if now >= check_at:
            check_at = now + _CHECK_EVERY_S
            if (reached := progress()) != seen:
                seen, moved = reached, now
        if now - moved > _LONGEST_STANDSTILL_S:
            raise ModelUnavailable(
                f"waited for {waiting_for}, but the worker that holds {path} made no progress for "
                f"{_LONGEST_STANDSTILL_S:.0f} s",
                fix="check if that worker is stopped or has lost its connection to the store",
                may_pass=True,
            )
        time.sleep(_POLL_S)


def _open(path: str) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _take(descriptor: int, shared: bool) -> bool:
    try:
        return try_lock(descriptor, shared)
    except OSError:
        os.close(descriptor)
        raise


def _is_current(path: str, descriptor: int) -> bool:
    """Return whether the locked file is still the one at the path: an eviction removes a model's lock files."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _release_in_child() -> None:
    """Close the parent's locks in a forked child, which would hold them even after the parent's death."""
    for descriptor in _held_exclusively:
        os.close(descriptor)
    _held_exclusively.clear()


os.register_at_fork(after_in_child=_release_in_child)
