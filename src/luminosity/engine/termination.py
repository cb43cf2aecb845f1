"""The end of runs by signals: SIGTERM ends a script like Ctrl-C does, and neither can break the wait for an end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Ending", "Terminated", "cancel_on_sigterm"]

_STANDARD_ERROR = 2  # its file descriptor
_CHECK_EVERY_S = 1.0  # how late a waiting thread notices the end if Ctrl-C breaks the lock


class Terminated(SystemExit):
    """Ends the script because of SIGTERM, with the exit code that a shell reports for it.

    Like every ``SystemExit`` it needs no handling: ``finally`` blocks run, and Python ends without a traceback.
    """

    def __init__(self, *_: Any) -> None:
        super().__init__(128 + signal.SIGTERM)


def cancel_on_sigterm(cancel: Callable[[], str]) -> None:
    """Handle SIGTERM from now on: call ``cancel``, then raise :class:`Terminated` in the main thread.

    ``cancel`` returns what happens to the runs, in words; if it returns nothing, there are none, and SIGTERM ends the
    process as without a handler. It must not block or take locks. Does nothing outside the main thread, if the script
    or ``lum`` handles SIGTERM itself, or in a notebook, whose kernel does not end with an exception.
    """
    if threading.current_thread() is not threading.main_thread() or "ipykernel" in sys.modules:
        return
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    owner = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() == owner and (what := cancel()):
            os.write(_STANDARD_ERROR, f"terminated: {what}\n".encode())  # print is not safe in a handler
            raise Terminated
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


class Ending:
    """An event that is set once, like ``threading.Event``, but which Ctrl-C can't break.

    If Ctrl-C arrives while a waiting thread holds the lock of a ``threading.Event``, the lock is never released, and
    ``wait`` and ``set`` block forever. Here the lock can only be taken after the event was set.

    >>> ending = Ending()
    >>> ending.wait(0)
    False
    >>> ending.set()
    >>> ending.wait(None)
    True
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake all threads that wait. Call it once."""
        self._is_set = True
        self._lock.release()

    def wait(self, seconds: float | None) -> bool:
        """Wait up to ``seconds``, or without a limit for None; return whether the event is set."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._is_set:
            left = _CHECK_EVERY_S if until is None else min(_CHECK_EVERY_S, until - time.monotonic())
            if left <= 0:
                return False
            if self._lock.acquire(timeout=left):
                self._lock.release()  # for the next thread; if Ctrl-C prevents it, that thread checks again soon
        return True
