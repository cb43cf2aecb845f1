"""Keys: read where they are used, and never to be seen elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NoReturn

from luminosity.errors import EndpointError

__all__ = ["ApiKey", "checked_headers", "looks_secret"]

_SECRET = re.compile(r"auth|key|token|secret|passw|credential|cookie|sig(nature)?$", re.IGNORECASE)


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
