"""Runs web applications: the listening socket, and a clean shutdown."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

from luminosity.errors import OptionError
from luminosity.extras import require

__all__ = ["listen", "serve", "url_of"]

_BACKLOG = 2048  # connections that wait to be accepted, as uvicorn's default
_GRACE_S = 10  # how long a shutdown waits for requests that are being handled
_KEEP_ALIVE_S = 75  # longer than a pipeline pauses between two requests


def listen(host: str, port: int) -> socket.socket:
    """Bind the address. Call it before other work, so that a port in use is reported at once."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. asyncio sets it only for sockets that name their protocol; without it, the body of a
        # reply waits 40 ms for the client to acknowledge the headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except OSError as error:
        fix = None if port == 0 else "use --port 0, which picks a free port"
        raise OptionError(f"can't listen on {host} port {port}: {error}", fix=fix) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: Any,
    listener: socket.socket,
    started: Callable[[], None],
    *,
    grace_s: int = _GRACE_S,
    stopping: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; call ``started`` when requests are accepted.

    ``app`` is an ASGI application. ``stopping`` is called in the signal's handler: it should let responses that never
    end by themselves end, because the shutdown waits ``grace_s`` seconds for responses.
    """
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
        timeout_graceful_shutdown=grace_s,
    )
    server = uvicorn.Server(config)
    if stopping is not None:
        handle_exit = server.handle_exit

        def stop(number: int, frame: Any) -> None:
            stopping()
            handle_exit(number, frame)

        server.handle_exit = stop
    # uvicorn raises the signal again after its shutdown.
    with contextlib.suppress(KeyboardInterrupt):
        started()
        server.run(sockets=[listener])
