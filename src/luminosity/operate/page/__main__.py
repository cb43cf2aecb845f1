"""The process of a page beside a run: gets its settings on standard input, and its listening socket from its parent."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path

_NICE = 10  # the run comes first
_LOOK_S = 1.0  # how often to look for the parent if the system does not tell when it ends


def main() -> None:
    """Serve until the parent ends this process, or has ended itself."""
    os.nice(_NICE)
    # Only now: the imports take half a second of a core.
    from luminosity.operate.page.app import Sources, serve_page

    settings = json.load(sys.stdin)
    _end_with(settings["parent"])
    with socket.socket(fileno=settings["listener"]) as listener:
        serve_page(Sources(Path(settings["folder"])), settings["token"], listener, lambda _: None)


def _end_with(parent: int) -> None:
    """Send this process SIGTERM as soon as its parent, process ``parent``, has ended."""
    threading.Thread(target=_wait_for_end, args=(parent,), name="parent", daemon=True).start()


def _wait_for_end(parent: int) -> None:
    try:
        descriptor = os.pidfd_open(parent)
    except (AttributeError, OSError):
        descriptor = None  # an old kernel, or the parent has ended already
    while os.getppid() == parent:  # not before: its number may belong to another process by now
        if descriptor is None:
            time.sleep(_LOOK_S)
        else:
            select.select([descriptor], [], [])  # readable when the process has ended
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
