"""How to reach a server: what travels with the pipeline, and the pool of connections that each worker opens."""

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

from luminosity.errors import EndpointError, RemoteModelError
from luminosity.inference.handlers.http.address import Address, ApiKey, checked_headers
from luminosity.inference.handlers.http.protocol import Reply, Request, shortened
from luminosity.inference.handlers.http.retries import Busy

__all__ = ["Connection", "exchange"]


_LOOPBACK = {"localhost", "127.0.0.1", "::1"}

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Connection:
    """Settings alone: nothing is opened or read before a worker asks for it."""

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
                raise ValueError(f"found {name}={getattr(self, name)!r}, expected more than nothing")

    def key(self) -> ApiKey | None:
        return None if self.api_key_env is None else ApiKey.read(self.api_key_env, self.api_key_header)

    def pools(self) -> urllib3.PoolManager:
        """Threads may share them. Proxies are those that the environment names, as everywhere in Python."""
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
            raise EndpointError(f"ca_file={self.ca_file!r} is not on this machine, expected a file of certificates")
        return self.ca_file


def exchange(
    pools: urllib3.PoolManager, request: Request, connection: Connection, key: ApiKey | None, seconds: float
) -> Reply:
    """Send it once, and read the whole reply within about so many seconds."""
    ends = time.monotonic() + seconds
    url = connection.address.shown(request.path)
    try:
        response = pools.urlopen(
            "GET" if request.body is None else "POST",
            connection.address.url(request.path),
            body=request.body,
            headers={**connection.headers, **request.headers, **(key.headers() if key else {})},
            retries=False,
            redirect=False,  # Whoever it leads to should not get the key.
            timeout=urllib3.Timeout(total=seconds),
            preload_content=False,
        )
        try:
            body = _read(response, url, ends, connection.max_response_bytes)
        except BaseException:
            response.close()  # What is left of the reply must not be taken for the next one.
            raise
        response.release_conn()
    except exceptions.SSLError as error:
        raise _tls(error, url) from error
    except (exceptions.NewConnectionError, exceptions.ConnectTimeoutError, exceptions.ProxyError) as error:
        raise Busy(f"{url} can't be reached: {_reason(error)}", by_examples=False) from error
    except exceptions.TimeoutError as error:
        raise Busy(f"{url} did not answer within {seconds:.3g} seconds") from error
    except exceptions.ProtocolError as error:
        raise Busy(f"{url} broke the connection: {_reason(error)}") from error
    except exceptions.DecodeError as error:
        raise RemoteModelError(f"{url} packed its answer in a way that can't be read: {_reason(error)}") from error
    except exceptions.HTTPError as error:
        raise EndpointError(f"{url} can't be asked: {_reason(error)}") from error
    return Reply(response.status, {name.lower(): value for name, value in response.headers.items()}, body, url, key)


def _read(response: Any, url: str, ends: float, most_bytes: int) -> bytes:
    """Piece by piece: a server that sends a byte now and then would keep a plain `read` for ever."""
    pieces: list[bytes] = []
    size = 0
    while piece := response.read1(_CHUNK):
        pieces.append(piece)
        size += len(piece)
        if size > most_bytes:
            raise RemoteModelError(
                f"{url} answered with more than {most_bytes:,} bytes, which max_response_bytes allows; "
                "a smaller max_batch_size makes smaller answers"
            )
        if time.monotonic() > ends:
            raise exceptions.TimeoutError("the answer came too slowly")
    return b"".join(pieces)


def _tls(error: exceptions.SSLError, url: str) -> Exception:
    inner = error.args[0] if error.args else error
    if isinstance(inner, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return Busy(f"{url} broke the connection: {_reason(error)}")
    hint = ""
    if isinstance(inner, ssl.SSLCertVerificationError):
        hint = (
            "; where the server has a certificate of your own making, ca_file='...' names the file that vouches for it"
        )
    elif getattr(inner, "reason", None) == "WRONG_VERSION_NUMBER":
        hint = "; a server without TLS has an address that begins with http://"
    return EndpointError(f"{url} can't be trusted, TLS was refused: {_reason(error)}{hint}")


def _reason(error: BaseException) -> str:
    """The innermost reason that urllib3 has wrapped, without its objects' names."""
    while error.args and isinstance(error.args[-1], BaseException):
        error = error.args[-1]
    if isinstance(error, exceptions.SSLError | exceptions.ProxyError) and error.args:
        return shortened(str(error.args[0]))
    return shortened(str(error).rpartition("): ")[2])
