"""Serves the page until it is stopped, and ends with the process that it belongs to."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable

from luminosity.operate.page.access import Access
from luminosity.operate.page.app import Sources, app_of
from luminosity.operate.page.event_stream import Streams
from luminosity.operate.web_server import serve

__all__ = ["end_with", "serve_page"]

_GRACE_S = 1  # how long Ctrl-C waits for replies; those that wait for events end at once
_LOOK_S = 1.0  # how often to look for the parent if the system does not tell when it ends


def serve_page(sources: Sources, token: str, listener: socket.socket, started: Callable[[Access], None]) -> None:
    """Serve the page until SIGINT or SIGTERM; call ``started`` when requests are accepted."""
    streams = Streams()
    access = Access(token, listener.getsockname()[1])
    app = app_of(sources, access, streams)
    serve(app, listener, lambda: started(access), grace_s=_GRACE_S, stopping=streams.stop)


def end_with(parent: int) -> None:
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
