"""Replies of the server: JSON, packed if it is large, errors, headers; and results that are kept for later replies."""

from __future__ import annotations

import gzip
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response

from luminosity.runs.records import FileVersion, version_of

__all__ = [
    "CSP",
    "FOREVER",
    "HEADERS",
    "REPORT_CSP",
    "KeptResults",
    "Packed",
    "error",
    "json_bytes",
    "json_reply",
    "reply",
    "with_headers",
]

FOREVER = float("inf")
V = TypeVar("V")
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
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


def with_headers(send: Send) -> Send:
    """Return a function that sends messages of ASGI with the headers of all replies."""

    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            found = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                found.setdefault(name, value)
        await send(message)

    return send_with_headers


def _without_nan(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_without_nan(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


class KeptResults(Generic[V]):
    """The results of a function of a file, up to a number of them; the one unused for longest goes first.

    May be used on several threads.
    """

    def __init__(self, make: Callable[[Path], tuple[V, float]], most: int) -> None:
        """``make`` returns a result for a file, and for how many seconds it counts if the file does not change."""
        self._make = make
        self._most = most
        self._lock = threading.Lock()
        self._held: OrderedDict[Path, tuple[FileVersion, float, V]] = OrderedDict()

    def get(self, path: Path) -> V | None:
        """Return the result for a file, or None if there is no file."""
        version = version_of(path)
        if version is None:
            return None
        with self._lock:
            held = self._held.get(path)
            if held is not None and held[0] == version and time.monotonic() < held[1]:
                self._held.move_to_end(path)
                return held[2]
        value, seconds = self._make(path)
        with self._lock:
            self._held[path] = (version, time.monotonic() + seconds, value)
            self._held.move_to_end(path)
            while len(self._held) > self._most:
                self._held.popitem(last=False)
        return value
