"""How to reach a server: what travels with the pipeline, and the pool of connections that each worker opens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.util import parse_url

from luminosity.errors import EndpointError
from luminosity.inference.handlers.http.address import Address
from luminosity.inference.handlers.http.secrets import ApiKey, checked_headers

__all__ = ["Connection"]

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


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
