"""A web server on this machine: its socket and shutdown, its address, and who may read it by token or cookie."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any

from luminosity.errors import OptionError
from luminosity.extras import require

__all__ = [
    "TOKEN_FILE",
    "Access",
    "Certificate",
    "address",
    "bind",
    "cookies_named",
    "is_loopback",
    "is_own_peer",
    "listen",
    "serve",
    "token_of",
    "url_of",
]

_BACKLOG = 2048  # connections that wait to be accepted, as uvicorn's default
_GRACE_S = 10  # how long a shutdown waits for requests that are being handled
_KEEP_ALIVE_S = 75  # longer than a pipeline pauses between two requests


@dataclass(frozen=True)
class Certificate:
    """The files of a certificate and of its key."""

    path: str
    key: str


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
    certificate: Certificate | None = None,
    grace_s: int = _GRACE_S,
    stopping: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; call ``started`` when requests are accepted.

    ``app`` is an ASGI application; with a ``certificate``, it is served with TLS. ``stopping`` is called in the
    signal's handler: it should let responses that never end by themselves end, because the shutdown waits ``grace_s``
    seconds for responses.
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
        proxy_headers=False,  # they would replace the address of the client, which anyone can send
        ssl_certfile=certificate.path if certificate else None,
        ssl_keyfile=certificate.key if certificate else None,
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


TOKEN_FILE = "ui-token"  # in the folder of records
_TOKEN_BYTES = 32
_ONCE_S = 60.0  # a browser has started by then
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")  # what 32 bytes are in URL-safe base64
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(?::\d{1,5})?")


class Access:
    """Decides who may read: a request needs the token, or the cookie that a request with the token gets.

    The cookie is not the token: a server on another port of this machine, which browsers send cookies to as well, can't
    find the token from it. Its name contains the port, so that several servers keep their cookies apart.
    """

    def __init__(self, token: str, port: int) -> None:
        self._token = token.encode()
        self._once: dict[str, float] = {}  # tokens that count once, and until when
        # It is for actions. No cookie has it or leads to it, and another server on this port can't have kept it.
        self.action_token = secrets.token_urlsafe(_TOKEN_BYTES)
        self.cookie_name = f"luminosity-ui-{port}"
        self.cookie_value = hmac.new(self._token, f"cookie {port}".encode(), hashlib.sha256).hexdigest()

    def once(self) -> str:
        """Return a token that counts once, within a minute: every user of this machine can see a browser's words."""
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._once[token] = time.monotonic() + _ONCE_S
        return token

    def is_token(self, given: str) -> bool:
        """Return whether ``given`` is the token, or one that counts once. Takes equally long for all wrong ones."""
        if time.monotonic() < self._once.pop(given, 0.0):
            return True
        return self.is_lasting(given)

    def has_cookie(self, headers: Iterable[str]) -> bool:
        """Return whether the ``Cookie`` headers of a request hold the cookie."""
        return any(
            hmac.compare_digest(given.encode("utf-8", "replace"), self.cookie_value.encode())
            for given in cookies_named(self.cookie_name, headers)
        )

    def has_bearer(self, header: str) -> bool:
        """Return whether an ``Authorization`` header holds the token, as Prometheus sends it."""
        scheme, _, given = header.partition(" ")
        return scheme.lower() == "bearer" and self.is_token(given.strip())

    def is_lasting(self, given: str) -> bool:
        """Return whether ``given`` is the token itself, not one that counts once, which others may have seen."""
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token)

    def may_act(self, header: str) -> bool:
        """Return whether an ``Authorization`` header holds the token for actions, or the token itself."""
        scheme, _, given = header.partition(" ")
        given = given.strip()
        is_for_actions = hmac.compare_digest(given.encode("utf-8", "replace"), self.action_token.encode())
        return scheme.lower() == "bearer" and (is_for_actions or self.is_lasting(given))

    @property
    def set_cookie(self) -> str:
        """The header that gives a browser the cookie: scripts can't read it, and requests of other sites lack it."""
        return f"{self.cookie_name}={self.cookie_value}; Path=/; HttpOnly; SameSite=Strict"


def cookies_named(name: str, headers: Iterable[str]) -> list[str]:
    """Return the values of a cookie in the ``Cookie`` headers of a request."""
    found: list[str] = []
    for header in headers:
        jar: SimpleCookie = SimpleCookie()
        with contextlib.suppress(CookieError):
            jar.load(header)
        if name in jar:
            found.append(jar[name].value)
    return found


def is_loopback(host: str) -> bool:
    """Return whether the value of a ``Host`` header, or of ``--host``, names this machine by its loopback address.

    Another name that leads here would let a page of that name read this one (DNS rebinding).

    >>> is_loopback("127.0.0.1:4747"), is_loopback("localhost"), is_loopback("[::1]:80"), is_loopback("::1")
    (True, True, True, True)
    >>> is_loopback("example.org"), is_loopback("localhost.example.org:4747"), is_loopback("0.0.0.0"), is_loopback("")
    (False, False, False, False)
    """
    match = _HOST.fullmatch(host)
    name = match["name"].strip("[]") if match else host
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_own_peer(scope: Mapping[str, Any]) -> bool:
    """Return whether a process of this user has made the connection of a request, on this machine's loopback.

    The kernel lists the sockets of both ends, each with its user.
    """
    client, server = scope.get("client"), scope.get("server")
    if not client or not server or not is_loopback(client[0]):
        return False
    ends = (f":{client[1]:04X}", f":{server[1]:04X}")
    users: set[str] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{name}") as file:
            rows = (line.split() for line in file)
            users |= {row[7] for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1])}
    return users == {str(os.geteuid())}


def token_of(folder: Path) -> str:
    """Return the token in the folder of records, and make one if there is none that only this user can read.

    The token outlives the server, so that open pages and Prometheus can connect again. Raises ``OSError`` if it can't
    be kept.
    """
    path = folder / TOKEN_FILE
    with contextlib.suppress(FileNotFoundError):
        found = _private_text(path)
        if _TOKEN.fullmatch(found):
            return found
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    unfinished = folder / f"{TOKEN_FILE}.{os.getpid()}.unfinished"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        file.write(token)
    os.replace(unfinished, path)
    return token


def _private_text(path: Path) -> str:
    """Return what a file holds, or an empty string if another user can read it, or could have written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError:
        return ""  # a link, or a file of another user: it is replaced
    with open(descriptor, errors="replace") as file:
        status = os.fstat(descriptor)
        is_private = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
        return file.read(100).strip() if is_private else ""


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
