"""Runs the web application: the listening socket, and a clean shutdown."""

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

_BACKLOG = 2048  # connections that wait to be accepted, as uvicorn's default
_GRACE_S = 10  # how long a shutdown waits for requests that are being handled
_KEEP_ALIVE_S = 75  # longer than a pipeline pauses between two requests


def listen(host: str, port: int) -> socket.socket:
    """Bind the address. Call it before the model is loaded, so that a port in use is reported at once."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        fix = None if port == 0 else "use --port 0, which picks a free port"
        raise OptionError(f"can't listen on {host} port {port}: {error}", fix=fix) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: Starlette, listener: socket.socket, started: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; call ``started`` when requests are accepted."""
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
    # uvicorn raises the signal again after its shutdown.
    with contextlib.suppress(KeyboardInterrupt):
        started()
        uvicorn.Server(config).run(sockets=[listener])
