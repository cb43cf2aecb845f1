"""Sends single requests: the server's address, connection settings, and every way in which a request can fail."""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3 import exceptions
from urllib3.util import parse_url

from luminosity.errors import EndpointError, InvalidArgument, RemoteModelError
from luminosity.inference.handlers.http.protocol import ApiKey, Request, Response, one_line
from luminosity.inference.handlers.http.retries import RetryableError
from luminosity.runs.senders import trace_headers

__all__ = ["Address", "Connection", "exchange"]

_NAME_THE_VARIABLE = "name the environment variable that holds it: api_key_env='...'"
_SECRET = re.compile(r"auth|key|token|secret|passw|credential|cookie|sig(nature)?$", re.IGNORECASE)


@dataclass(frozen=True)
class Address:
    """A server's base URL. Its query is sent with every request and never shown in a message."""

    scheme: str
    host: str
    port: int
    path: str
    query: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Take a URL apart. Raises ``InvalidArgument`` if it is not http(s) or contains a password or a secret.

        >>> Address.parse("https://api.example.com/v1/").shown("/v1/embeddings")
        'https://api.example.com/v1/embeddings'
        >>> Address.parse("http://user:word@localhost:8000")
        Traceback (most recent call last):
        luminosity.errors.InvalidArgument: found a user or a password in the address of localhost, ...
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            shown = f"{parts.scheme}://..." if "@" in url else repr(url)
            raise InvalidArgument(f"found the address {shown}, expected one such as https://api.example.com")
        if "@" in parts.netloc:
            raise InvalidArgument(
                f"found a user or a password in the address of {parts.hostname}, where anyone may read it",
                fix=_NAME_THE_VARIABLE,
            )
        for name, _ in parse_qsl(parts.query, keep_blank_values=True):
            if looks_secret(name):
                raise InvalidArgument(
                    f"found {name!r} in the query of the address of {parts.hostname}, which looks like a secret",
                    fix=_NAME_THE_VARIABLE,
                )
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"), parts.query)

    def url(self, path: str) -> str:
        """Return the full URL of a path below this address, for sending.

        >>> Address.parse("http://host/models?api-version=2").url("/v2/models/m/infer")
        'http://host/models/v2/models/m/infer?api-version=2'
        """
        return self.shown(path) + (f"{'&' if '?' in path else '?'}{self.query}" if self.query else "")

    def shown(self, path: str = "") -> str:
        """Return the URL of a path below this address, for messages: without the query."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == (443 if self.scheme == "https" else 80) else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self._below(path)}"

    def _below(self, path: str) -> str:
        """Join the paths.

        Many users give a base that already ends in the version, as the clients of OpenAI expect it.
        """
        version = "/" + path.strip("/").partition("/")[0]
        base = self.path.removesuffix(version) if path and self.path.endswith(version) else self.path
        return base + path


def looks_secret(name: str) -> bool:
    """Return whether a header or query parameter of this name is probably secret.

    >>> [looks_secret(name) for name in ("Authorization", "X-Api-Key", "sig", "api-version", "X-Team")]
    [True, True, True, False, False]
    """
    return _SECRET.search(name) is not None


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers as a dict. Raises ``InvalidArgument`` for a secret: headers are pickled with the pipeline."""
    for name, value in headers.items():
        if looks_secret(name):
            raise InvalidArgument(
                f"found the header {name!r}, which looks like a secret",
                fix=f"{_NAME_THE_VARIABLE}, and api_key_header={name!r} if it is not a bearer token",
            )
        if not (name + value).isprintable():
            raise InvalidArgument(f"found unprintable characters in the header {name!r}, expected printable text")
    return dict(headers)


_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_CHUNK = 1 << 20  # bytes read at once; the deadline is checked after each chunk


@dataclass(frozen=True)
class Connection:
    """The settings of a connection, pickled with the pipeline. Nothing is opened or read before a worker needs it."""

    address: Address
    api_key_env: str | None = None
    api_key_header: str = "Authorization"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout: float = 60.0
    deadline: float = 300.0
    concurrency: int = 64
    ca_file: str | None = None
    max_response_bytes: int = 256_000_000

    def __post_init__(self) -> None:
        checked_headers(self.headers)
        for name in ("timeout", "deadline", "concurrency", "max_response_bytes"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"found {name}={getattr(self, name)!r}, expected more than 0")

    def key(self) -> ApiKey | None:
        """Read the API key from the environment of this process, or return None if none is configured."""
        return None if self.api_key_env is None else ApiKey.read(self.api_key_env, self.api_key_header)

    def open_client(self) -> urllib3.PoolManager:
        """Return an HTTP client that threads may share. It uses the proxies that the environment names."""
        options: dict[str, Any] = {"maxsize": self.concurrency, "retries": False}
        if self.address.scheme == "https":
            options |= {"cert_reqs": "CERT_REQUIRED", "ca_certs": self._certificates()}
        proxy = getproxies().get(self.address.scheme)
        if proxy and self.address.host not in _LOOPBACK and not proxy_bypass(self.address.host):
            named = parse_url(proxy)
            login = urllib3.make_headers(proxy_basic_auth=named.auth) if named.auth else None
            return urllib3.ProxyManager(proxy, proxy_headers=login, **options)
        return urllib3.PoolManager(**options)

    def _certificates(self) -> str | None:
        if self.ca_file is not None and not os.path.isfile(self.ca_file):
            raise EndpointError(f"ca_file={self.ca_file!r} is not on the worker, expected a file of certificates")
        return self.ca_file


def exchange(
    client: urllib3.PoolManager, request: Request, connection: Connection, key: ApiKey | None, seconds: float
) -> Response:
    """Send a request once and read the whole response within about ``seconds``.

    Raises ``RetryableError`` if the same request may succeed later, and ``RemoteModelError`` otherwise.
    """
    began = time.monotonic()
    ends = began + seconds
    arrivals: list[tuple[int, float]] = []
    url = connection.address.shown(request.path)
    try:
        raw = client.urlopen(
            "GET" if request.body is None else "POST",
            connection.address.url(request.path),
            body=request.body,
            headers={**trace_headers(), **connection.headers, **request.headers, **(key.headers() if key else {})},
            retries=False,
            redirect=False,  # another server must not get the key
            timeout=urllib3.Timeout(total=seconds),
            preload_content=False,
        )
        try:
            arrived = (lambda size: arrivals.append((size, time.monotonic() - began))) if request.is_stream else None
            body = _read(raw, url, ends, connection.max_response_bytes, arrived)
        except BaseException:
            raw.close()  # the unread rest must not be read as the next response
            raise
        raw.release_conn()
    except exceptions.SSLError as error:
        raise _tls(error, url) from error
    except (exceptions.NewConnectionError, exceptions.ConnectTimeoutError, exceptions.ProxyError) as error:
        raise RetryableError(f"{url} can't be reached: {_reason(error)}", by_examples=False, may_cost=False) from error
    except exceptions.TimeoutError as error:
        raise RetryableError(f"{url} did not answer within {seconds:.3g} seconds") from error
    except exceptions.ProtocolError as error:
        raise RetryableError(f"{url} broke the connection: {_reason(error)}") from error
    except exceptions.DecodeError as error:
        raise RemoteModelError(f"{url} sent a response that can't be decompressed: {_reason(error)}") from error
    except exceptions.HTTPError as error:
        raise EndpointError(f"the request to {url} failed: {_reason(error)}") from error
    headers = {name.lower(): value for name, value in raw.headers.items()}
    return Response(raw.status, headers, body, url, key, request, tuple(arrivals))


def _read(raw: Any, url: str, ends: float, max_bytes: int, arrived: Callable[[int], None] | None = None) -> bytes:
    """Read chunk by chunk: a server that sends a byte now and then would block a plain ``read`` without end."""
    pieces: list[bytes] = []
    size = 0
    while piece := raw.read1(_CHUNK):
        pieces.append(piece)
        size += len(piece)
        if arrived is not None:
            arrived(size)
        if size > max_bytes:
            raise RemoteModelError(
                f"{url} answered with more than {max_bytes:,} bytes, the limit of max_response_bytes",
                fix="pass a smaller max_batch_size, which makes responses smaller, or a larger max_response_bytes",
            )
        if time.monotonic() > ends:
            raise exceptions.TimeoutError("the response came too slowly")
    return b"".join(pieces)


def _tls(error: exceptions.SSLError, url: str) -> Exception:
    inner = error.args[0] if error.args else error
    if isinstance(inner, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return RetryableError(f"{url} broke the connection: {_reason(error)}")
    fix = None
    if isinstance(inner, ssl.SSLCertVerificationError):
        fix = "if you made the server's certificate yourself, pass the file that it is signed with: ca_file='...'"
    elif getattr(inner, "reason", None) == "WRONG_VERSION_NUMBER":
        fix = "if the server has no TLS, pass an address that begins with http://"
    return EndpointError(f"{url} can't be trusted, TLS was refused: {_reason(error)}", fix=fix)


def _reason(error: BaseException) -> str:
    """Return the innermost reason that urllib3 has wrapped, without the names of its objects."""
    while error.args and isinstance(error.args[-1], BaseException):
        error = error.args[-1]
    if isinstance(error, exceptions.SSLError | exceptions.ProxyError) and error.args:
        return one_line(str(error.args[0]))
    return one_line(str(error).rpartition("): ")[2])
