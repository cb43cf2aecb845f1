"""Locks between processes, which the kernel frees when their holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Generator

from luminosity.errors import ModelUnavailable

__all__ = ["exclusive", "shared", "try_exclusive"]

_LOGGER = logging.getLogger("luminosity")

_POLL_S = 0.05
_FIRST_WORD_S = 10.0
_WORD_EVERY_S = 60.0
_LOOK_EVERY_S = 1.0
_LONGEST_STANDSTILL_S = 600.0

_held_alone: set[int] = set()


def shared(path: str, waiting_for: str) -> int:
    """Take the lock together with others, until the descriptor is closed or the process ends."""
    return _acquire(path, fcntl.LOCK_SH, waiting_for, lambda: 0)


@contextlib.contextmanager
def exclusive(path: str, waiting_for: str, progress: Callable[[], int] = lambda: 0) -> Generator[None]:
    """Hold the lock alone.

    A wait ends with an error when `progress` of the holder has stood still for ten minutes.
    """
    with _alone(_acquire(path, fcntl.LOCK_EX, waiting_for, progress)):
        yield


@contextlib.contextmanager
def try_exclusive(path: str) -> Generator[bool]:
    """Hold the lock alone if it is free now."""
    descriptor = _open(path)
    if not _take(descriptor, fcntl.LOCK_EX) or not _is_current(path, descriptor):
        os.close(descriptor)
        yield False
        return
    with _alone(descriptor):
        yield True


@contextlib.contextmanager
def _alone(descriptor: int) -> Generator[None]:
    _held_alone.add(descriptor)
    try:
        yield
    finally:
        _held_alone.discard(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone would not do where a forked child has it open
        os.close(descriptor)


def _acquire(path: str, kind: int, waiting_for: str, progress: Callable[[], int]) -> int:
    began = moved = time.monotonic()
    say_at = began + _FIRST_WORD_S
    look_at, seen = began, -1
    while True:
        descriptor = _open(path)
        if _take(descriptor, kind) and _is_current(path, descriptor):
            return descriptor
        os.close(descriptor)
        now = time.monotonic()
        if now >= say_at:
            _LOGGER.info("waiting for %s for %.0f s: another worker is at it (%s)", waiting_for, now - began, path)
            say_at = now + _WORD_EVERY_S
        if now >= look_at:
            look_at = now + _LOOK_EVERY_S
            if (reached := progress()) != seen:
                seen, moved = reached, now
        if now - moved > _LONGEST_STANDSTILL_S:
            raise ModelUnavailable(
                f"waited for {waiting_for}, and the worker that holds {path} did nothing for "
                f"{_LONGEST_STANDSTILL_S:.0f} s; is it stopped, or its connection to the store lost?"
            )
        time.sleep(_POLL_S)


def _open(path: str) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _take(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        os.close(descriptor)
        raise
    return True


def _is_current(path: str, descriptor: int) -> bool:
    """Whether the locked file is still the one at the path: who evicts a model removes its lock, too."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _let_go_in_child() -> None:
    """A forked child would else keep a lock for its parent, even when that has died."""
    for descriptor in _held_alone:
        os.close(descriptor)
    _held_alone.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
