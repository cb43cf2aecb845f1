"""The batch API of OpenAI's protocol: a file of requests goes in, a file of answers comes out within a day."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from luminosity.errors import EndpointError, RemoteModelError
from luminosity.inference.handlers.http.protocol import Request, Response, to_json_bytes
from luminosity.inference.handlers.http.retries import RetryableError, delay

__all__ = ["BatchApi", "BatchState", "Line", "line_of"]

_MOST_ATTEMPTS = 6  # to make a batch, with some seconds between them
_MOST_PAGES = 20  # of the list of batches, each with 100: those of some weeks
_DONE = frozenset({"completed", "expired", "cancelled", "failed"})
_NAME = "luminosity"  # of the metadata that finds a batch again
Once: TypeAlias = Callable[[Request], Response]
"""Sends a request once; raises ``RetryableError`` if it may succeed later."""


@dataclass(frozen=True)
class BatchState:
    """What the server says about a batch."""

    status: str
    files: tuple[str, ...] = ()
    """Of answers and of errors."""
    reason: str = ""
    """Why the whole batch has failed."""

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.status in _DONE


@dataclass(frozen=True)
class Line:
    """The answer to one request of a batch."""

    key: bytes
    status: int
    """Of HTTP; 0 if the server did not get to the request."""
    body: bytes
    reason: str = ""


def line_of(key: bytes, path: str, body: bytes) -> bytes:
    """Return a request as a line of a file."""
    head = {"custom_id": key.hex(), "method": "POST", "url": path}
    return to_json_bytes(head)[:-1] + b',"body":' + body + b"}\n"


class BatchApi:
    """Talks to the batch API of one server."""

    def __init__(self, send: Callable[[Request], Response], once: Once) -> None:
        """``send`` retries until its deadline; ``once`` does not."""
        self._send = send
        self._once = once
        self._random = random.Random()

    def upload(self, lines: bytes) -> str:
        """Send a file of requests, and return its name on the server."""
        boundary = uuid.uuid4().hex
        parts = [
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode(),
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="requests.jsonl"\r\n'.encode(),
            b"Content-Type: application/jsonl\r\n\r\n" + lines + f"\r\n--{boundary}--\r\n".encode(),
        ]
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return _id_of(self._send(Request("/v1/files", b"".join(parts), headers)))

    def make(self, name: str, file_id: str, path: str, window: str) -> str:
        """Make a batch of a file, and return the server's name of it.

        If it is not known whether the server has made it, the server is asked: it must not be made twice.
        """
        body = {"input_file_id": file_id, "endpoint": path, "completion_window": window, "metadata": {_NAME: name}}
        request = Request("/v1/batches", to_json_bytes(body))
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            try:
                return _id_of(self._once(request))
            except RetryableError as error:
                if error.may_cost and (found := self.find(name)) is not None:
                    return found
                if attempt == _MOST_ATTEMPTS:
                    raise RemoteModelError(f"{error}. Tried {attempt} times.", may_pass=True) from error
                time.sleep(delay(attempt, error.retry_after_s, self._random))
        raise AssertionError("the last attempt returns or raises")

    def find(self, name: str) -> str | None:
        """Return the server's name of the batch that was made under a name of ours; None if there is none."""
        after = ""
        for _ in range(_MOST_PAGES):
            found = self._send(Request(f"/v1/batches?limit=100{after}")).json()
            listed: list[dict[str, Any]] = found.get("data") or []
            for each in listed:
                if (each.get("metadata") or {}).get(_NAME) == name:
                    return str(each["id"])
            if not listed or not found.get("has_more"):
                return None
            after = f"&after={listed[-1]['id']}"
        return None

    def state(self, batch_id: str) -> BatchState:
        """Ask how a batch does."""
        found = self._send(Request(f"/v1/batches/{batch_id}")).json()
        files = tuple(str(found[each]) for each in ("output_file_id", "error_file_id") if found.get(each))
        errors: Any = found.get("errors")
        listed: Any = errors.get("data") if isinstance(errors, Mapping) else None
        reasons = [str(each.get("message")) for each in listed or [] if isinstance(each, Mapping)]
        return BatchState(str(found.get("status")), files, "; ".join(reasons[:3]))

    def lines(self, file_id: str) -> Iterator[Line]:
        """Yield the answers in a file."""
        response = self._send(Request(f"/v1/files/{file_id}/content"))
        for text in response.body.splitlines():
            if text.strip():
                yield _line(text, response)


def _line(text: bytes, response: Response) -> Line:
    try:
        found = json.loads(text)
        key = bytes.fromhex(found["custom_id"])
    except (ValueError, TypeError, KeyError):
        raise response.endpoint_error(f"the line {response.quoted(text)!r}", "an answer with a custom_id") from None
    error, answer = found.get("error"), found.get("response")
    if isinstance(answer, dict):
        return Line(key, int(answer.get("status_code") or 0), to_json_bytes(answer.get("body")))
    reason = error.get("message") or error.get("code") if isinstance(error, dict) else None
    return Line(key, 0, b"", str(reason or "no answer"))


def _id_of(response: Response) -> str:
    found = response.json().get("id")
    if not isinstance(found, str) or not found:
        raise EndpointError(
            f"{response.url} answered without an id, expected one", fix="check that the server has a batch API"
        )
    return found
