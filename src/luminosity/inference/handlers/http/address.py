"""The address of a server and its API key, and how to keep secrets out of messages and pickles."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import parse_qsl, urlsplit

from luminosity.errors import EndpointError, InvalidArgument

__all__ = ["Address", "ApiKey", "checked_headers"]


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
        return self.shown(path) + (f"?{self.query}" if self.query else "")

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


class ApiKey:
    """An API key that can be sent to its server, but not shown or pickled."""

    def __init__(self, variable: str, header: str, value: str) -> None:
        self._variable = variable
        self._header = header
        self._value = value

    @classmethod
    def read(cls, variable: str, header: str) -> ApiKey:
        """Read the key from an environment variable. Raises ``EndpointError`` if it is not set or not a key."""
        value = os.environ.get(variable, "").strip()
        if not value:
            raise EndpointError(
                f"the environment variable {variable}, which api_key_env names, is not set on the worker",
                fix=f"set it before the pipeline starts: export {variable}=...",
            )
        if not (value.isascii() and value.isprintable()):
            # http.client raises for these, too, but its message shows the key.
            raise EndpointError(f"the environment variable {variable} holds characters that no API key has")
        return cls(variable, header, value)

    def headers(self) -> dict[str, str]:
        """Return the header that carries the key."""
        bearer = self._header.lower() == "authorization" and " " not in self._value
        return {self._header: f"Bearer {self._value}" if bearer else self._value}

    def redact(self, text: str) -> str:
        """Replace the key in ``text``: some servers repeat a wrong key in their response."""
        return text.replace(self._value, "***")

    def __repr__(self) -> str:
        return f"ApiKey({self._variable!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} stays in the process that has read it")
