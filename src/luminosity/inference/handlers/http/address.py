"""Where a server is, and how much of that may be shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import parse_qsl, urlsplit

from luminosity.errors import EndpointError

__all__ = ["Address", "ApiKey", "checked_headers", "looks_secret"]


_SECRET = re.compile(r"auth|key|token|secret|passw|credential|cookie|sig(nature)?$", re.IGNORECASE)


@dataclass(frozen=True)
class Address:
    """A server's base URL, taken apart. The query is sent with every request and shown in no message."""

    scheme: str
    host: str
    port: int
    path: str
    query: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """
        >>> Address.parse("https://api.example.com/v1/").shown("/v1/embeddings")
        'https://api.example.com/v1/embeddings'
        >>> Address.parse("http://user:word@localhost:8000")
        Traceback (most recent call last):
        ValueError: found a user or a password in the address of localhost, where anyone may read it; name the ...
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            shown = f"{parts.scheme}://..." if "@" in url else repr(url)
            raise ValueError(f"found the address {shown}, expected one such as https://api.example.com")
        if "@" in parts.netloc:
            raise ValueError(
                f"found a user or a password in the address of {parts.hostname}, where anyone may read it; name the "
                "environment variable that holds the key instead: api_key_env='...'"
            )
        for name, _ in parse_qsl(parts.query, keep_blank_values=True):
            if looks_secret(name):
                raise ValueError(
                    f"found {name!r} in the query of the address of {parts.hostname}, which looks like a secret; name "
                    "the environment variable that holds it instead: api_key_env='...'"
                )
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"), parts.query)

    def url(self, path: str) -> str:
        """
        >>> Address.parse("http://host/models?api-version=2").url("/v2/models/m/infer")
        'http://host/models/v2/models/m/infer?api-version=2'
        """
        return self.shown(path) + (f"?{self.query}" if self.query else "")

    def shown(self, path: str = "") -> str:
        """For messages: nothing that could be a secret."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == (443 if self.scheme == "https" else 80) else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self._below(path)}"

    def _below(self, path: str) -> str:
        """Many give a base that ends in the version already, as the clients of such servers want it."""
        version = "/" + path.strip("/").partition("/")[0]
        base = self.path.removesuffix(version) if path and self.path.endswith(version) else self.path
        return base + path


def looks_secret(name: str) -> bool:
    """
    >>> [looks_secret(name) for name in ("Authorization", "X-Api-Key", "sig", "api-version", "X-Team")]
    [True, True, True, False, False]
    """
    return _SECRET.search(name) is not None


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers as they are; they travel with the pipeline, which is no place for a secret."""
    for name, value in headers.items():
        if looks_secret(name):
            raise ValueError(
                f"found the header {name!r}, which looks like a secret; name the environment variable that holds it "
                f"instead: api_key_env='...', and api_key_header={name!r} where it is not a bearer token"
            )
        if not (name + value).isprintable():
            raise ValueError(f"found a line break or the like in the header {name!r}, expected printable text")
    return dict(headers)


class ApiKey:
    """Can be sent to its server, and neither shown nor pickled."""

    def __init__(self, variable: str, header: str, value: str) -> None:
        self._variable = variable
        self._header = header
        self._value = value

    @classmethod
    def read(cls, variable: str, header: str) -> ApiKey:
        value = os.environ.get(variable, "").strip()
        if not value:
            raise EndpointError(
                f"The environment variable {variable}, which api_key_env names, is not set on the worker. Set it "
                f"before the pipeline starts: export {variable}=..."
            )
        if not (value.isascii() and value.isprintable()):
            # http.client would say so, too, and show the key.
            raise EndpointError(f"The environment variable {variable} holds characters that no API key has.")
        return cls(variable, header, value)

    def headers(self) -> dict[str, str]:
        bearer = self._header.lower() == "authorization" and " " not in self._value
        return {self._header: f"Bearer {self._value}" if bearer else self._value}

    def hidden_in(self, text: str) -> str:
        """Some servers tell a wrong key back."""
        return text.replace(self._value, "***")

    def __repr__(self) -> str:
        return f"ApiKey({self._variable!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} stays in the process that has read it")
