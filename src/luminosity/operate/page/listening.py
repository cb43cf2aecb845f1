"""The address of the page: on this machine only."""

from __future__ import annotations

import socket

from luminosity.errors import OptionError
from luminosity.operate.page.access import is_loopback
from luminosity.operate.web_server import listen, url_of

__all__ = ["DEFAULT_HOST", "DEFAULT_PORT", "address", "bind"]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 4747
_LAST_PORT = 65_535


def bind(host: str = DEFAULT_HOST, port: int | None = None) -> socket.socket:
    """Return a listener on a loopback address. Without a port, it takes the usual one, or a free one if that is taken.

    Raises :class:`OptionError` if the host is not this machine's loopback, or if the port is taken.
    """
    if not is_loopback(host) or (":" in host and host.count(":") == 1):
        raise OptionError(
            f"--host={host}: found an address that other machines can reach, expected localhost, 127.0.0.1 or ::1; the "
            "page shows what your code logs and how it fails, and is not encrypted",
            fix=f"to open it elsewhere, forward the port: ssh -L {DEFAULT_PORT}:127.0.0.1:{DEFAULT_PORT} THIS_MACHINE",
        )
    if port is not None and not 0 <= port <= _LAST_PORT:
        raise OptionError(f"--port={port}: expected a number from 0 to {_LAST_PORT}")
    host = host.strip("[]")
    if port is not None:
        return listen(host, port)
    try:
        return listen(host, DEFAULT_PORT)
    except OptionError:
        return listen(host, 0)


def address(listener: socket.socket, token: str) -> str:
    """Return the address that opens the page, with the token."""
    return f"{url_of(listener)}/runs?token={token}"
