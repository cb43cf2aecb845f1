"""Lets SIGTERM end a script like Ctrl-C does: the runs are cancelled, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Terminated", "cancel_on_sigterm"]

_STANDARD_ERROR = 2  # its file descriptor


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
