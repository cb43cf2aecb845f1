"""The end of a run, which others wait for."""

from __future__ import annotations

import threading
import time

__all__ = ["Ending"]

_LOOK_S = 1.0


class Ending:
    """As ``threading.Event``, which Ctrl-C breaks: when it comes while one that waits has the event's lock, the lock is
    never given back, and neither waiting nor telling ever ends. Here, who has the lock has seen the end already.

    >>> ending = Ending()
    >>> ending.wait(0)
    False
    >>> ending.tell()
    >>> ending.wait(None)
    True
    """

    def __init__(self) -> None:
        self._is_told = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def tell(self) -> None:
        """Once."""
        self._is_told = True
        self._lock.release()

    def wait(self, seconds: float | None) -> bool:
        """Whether the end was told within so many seconds."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._is_told:
            left = _LOOK_S if until is None else min(_LOOK_S, until - time.monotonic())
            if left <= 0:
                return False
            if self._lock.acquire(timeout=left):
                self._lock.release()  # for the next one; should Ctrl-C come just before, that one looks again soon
        return True
