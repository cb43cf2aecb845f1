"""The server process: an address of its own, and an end without a traceback."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from luminosity.errors import OptionError
from luminosity.extras import require

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["listen", "serve", "url_of"]

_BACKLOG = 2048
_GRACE_S = 10
"""For requests that are under way when the server is told to stop."""

_KEEP_ALIVE_S = 75
"""Longer than a pipeline pauses between two requests."""


def listen(host: str, port: int) -> socket.socket:
    """Take the address, before anything slow: a port that is taken is told at once."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        hint = "" if port == 0 else "; --port 0 picks one that is free"
        raise OptionError(f"can't listen on {host} port {port}: {error}{hint}") from None
    return taken


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: Starlette, listener: socket.socket, started: Callable[[], None]) -> None:
    """Answer until SIGINT or SIGTERM; ``started`` is called when the first request would be answered."""
    uvicorn = require("uvicorn", "serve")
    listener.listen(_BACKLOG)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    # Uvicorn raises the signal once more when it is done.
    with contextlib.suppress(KeyboardInterrupt):
        started()
        uvicorn.Server(config).run(sockets=[listener])
