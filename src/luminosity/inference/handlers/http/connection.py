"""Sends single requests: connection settings, and every way in which a request can fail."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3 import exceptions
from urllib3.util import parse_url

from luminosity.errors import EndpointError, InvalidArgument, RemoteModelError
from luminosity.inference.handlers.http.address import Address, ApiKey, checked_headers
from luminosity.inference.handlers.http.protocol import Request, Response, one_line
from luminosity.inference.handlers.http.retries import RetryableError

__all__ = ["Connection", "exchange"]


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
    ends = time.monotonic() + seconds
    url = connection.address.shown(request.path)
    try:
        raw = client.urlopen(
            "GET" if request.body is None else "POST",
            connection.address.url(request.path),
            body=request.body,
            headers={**connection.headers, **request.headers, **(key.headers() if key else {})},
            retries=False,
            redirect=False,  # another server must not get the key
            timeout=urllib3.Timeout(total=seconds),
            preload_content=False,
        )
        try:
            body = _read(raw, url, ends, connection.max_response_bytes)
        except BaseException:
            raw.close()  # the unread rest must not be read as the next response
            raise
        raw.release_conn()
    except exceptions.SSLError as error:
        raise _tls(error, url) from error
    except (exceptions.NewConnectionError, exceptions.ConnectTimeoutError, exceptions.ProxyError) as error:
        raise RetryableError(f"{url} can't be reached: {_reason(error)}", by_examples=False) from error
    except exceptions.TimeoutError as error:
        raise RetryableError(f"{url} did not answer within {seconds:.3g} seconds") from error
    except exceptions.ProtocolError as error:
        raise RetryableError(f"{url} broke the connection: {_reason(error)}") from error
    except exceptions.DecodeError as error:
        raise RemoteModelError(f"{url} sent a response that can't be decompressed: {_reason(error)}") from error
    except exceptions.HTTPError as error:
        raise EndpointError(f"the request to {url} failed: {_reason(error)}") from error
    return Response(raw.status, {name.lower(): value for name, value in raw.headers.items()}, body, url, key, request)


def _read(raw: Any, url: str, ends: float, max_bytes: int) -> bytes:
    """Read chunk by chunk: a server that sends a byte now and then would block a plain ``read`` without end."""
    pieces: list[bytes] = []
    size = 0
    while piece := raw.read1(_CHUNK):
        pieces.append(piece)
        size += len(piece)
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
