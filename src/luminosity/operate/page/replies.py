"""Replies of the server: JSON, packed if it is large, errors, and the headers of every reply."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

__all__ = ["CSP", "HEADERS", "REPORT_CSP", "Packed", "error", "json_bytes", "json_reply", "reply"]

_PACK_FROM = 16_000  # bytes; smaller bodies are sent faster than they are packed
_PACK_LEVEL = 3  # on the loopback, time counts more than size

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report is a file that this server only passes on: it may show itself, and nothing else.
REPORT_CSP = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Packed:
    """A body, and the same body packed, which is made once."""

    body: bytes

    @cached_property
    def packed(self) -> bytes:
        """The body in gzip's format."""
        return gzip.compress(self.body, _PACK_LEVEL, mtime=0)

    @property
    def is_large(self) -> bool:
        """Whether packing is worth its time."""
        return len(self.body) >= _PACK_FROM


def json_bytes(data: Any) -> bytes:
    """Return ``data`` as JSON. Numbers that JSON does not have become null.

    >>> json_bytes({"a": [1.5, float("nan")]})
    b'{"a":[1.5,null]}'
    """
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_without_nan(data), separators=(",", ":"), allow_nan=False)
    return text.encode()


def json_reply(request: Request, content: Packed, status: int = 200) -> Response:
    """Return a reply with JSON, packed if it is large and the client takes that. Call it on a thread if it is large."""
    return reply(request, content, "application/json", status)


def reply(
    request: Request, content: Packed, kind: str, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a reply with a body, packed if it is large and the client takes that."""
    headers = {"vary": "accept-encoding", **(headers or {})}
    takes = [each.strip().partition(";")[0].lower() for each in request.headers.get("accept-encoding", "").split(",")]
    if content.is_large and "gzip" in takes:
        return Response(content.packed, status, {**headers, "content-encoding": "gzip"}, kind)
    return Response(content.body, status, headers, kind)


def error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Return a reply that says what was found and what was expected."""
    return Response(json_bytes({"error": message}), status, headers, "application/json")


def _without_nan(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_without_nan(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
