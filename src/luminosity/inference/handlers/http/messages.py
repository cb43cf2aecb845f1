"""What goes to a server and what comes back, whichever protocol says what it means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from luminosity.errors import EndpointError, RemoteModelError
from luminosity.inference.blocks import Block
from luminosity.inference.handlers.http.secrets import ApiKey

__all__ = ["Answer", "Reply", "Request", "in_json", "shortened"]

_READ_CHARACTERS = 10_000
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Request:
    """`path` stands below the address that the user gave. Without a body it is a GET."""

    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})


@dataclass(frozen=True)
class Reply:
    """`url` is what errors may show of the address; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str
    key: ApiKey | None = field(default=None, repr=False)

    def json(self) -> dict[str, Any]:
        """The body as an object; anything else means that something else than this protocol answers there."""
        try:
            value = json.loads(self.body)
        except ValueError:
            raise self.misread(f"the text {self.quoted(self.body)!r}", "a JSON object") from None
        if not isinstance(value, dict):
            raise self.misread(f"the JSON value {self.quoted(self.body)!r}", "a JSON object")
        return value

    def quoted(self, text: bytes | str) -> str:
        """For messages: a server may say anything, and the key, too."""
        start = text[:_READ_CHARACTERS]
        whole = start.decode(errors="replace") if isinstance(start, bytes) else start
        return shortened(self.key.hidden_in(whole) if self.key else whole)

    def misread(self, found: str, expected: str) -> EndpointError:
        """Another protocol than the expected one: no example would fare better."""
        return EndpointError(
            f"{self.url} answered {self.quoted(found)}, expected {expected}; is this the address of such a server?"
        )

    def wrong(self, found: str, expected: str) -> RemoteModelError:
        """The right protocol, but not what these examples should get."""
        return RemoteModelError(f"{self.url} answered {self.quoted(found)}, expected {expected}")


@dataclass(frozen=True)
class Answer:
    """A prediction for each example of a request, and what the server calls its model."""

    values: Block
    model_id: str | None = None


def in_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def shortened(text: str) -> str:
    """The beginning, on one line: pages and traces are long.

    >>> shortened("<html>\\n  <body>" + 1000 * "x")[:30]
    '<html> <body>xxxxxxxxxxxxxxxxx'
    """
    line = " ".join(text[:_READ_CHARACTERS].split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"
