"""What a server's status means for the request: fine, again, these examples' fault, or nobody's but the endpoint's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from luminosity.errors import EndpointError, RemoteModelError
from luminosity.inference.handlers.http.backoff import retry_after
from luminosity.inference.handlers.http.messages import Reply

__all__ = ["Busy", "check_status"]

_AGAIN = {408, 429, 502, 503, 504}
_HINTS = {
    401: "is the key right? api_key_env names the variable that holds it",
    403: "may this key use this model?",
    404: "are the address and the model's name right?",
    405: "is this the address of such a server?",
    413: "a smaller max_batch_size makes smaller requests",
}
_OF_THE_ENDPOINT = {401, 403, 404, 405, 407, 410, 426, 501}


class Busy(Exception):
    """The same request may succeed later. `by_examples`: it may also be these examples that bring the server down."""

    def __init__(self, message: str, by_examples: bool = True, asked: float | None = None) -> None:
        super().__init__(message)
        self.by_examples = by_examples
        self.asked = asked


def check_status(reply: Reply) -> None:
    """Raise what the status means, unless it is success."""
    status = reply.status
    if 200 <= status < 300:
        return
    said = reply.quoted(_said(reply.body))
    message = f"{reply.url} answered {status}" + (f": {said}" if said else "")
    if status in _AGAIN:
        raise Busy(message, by_examples=status != 429, asked=retry_after(reply.headers.get("retry-after")))
    if 300 <= status < 400:
        raise EndpointError(f"{reply.url} answered {status}, that the model is elsewhere; give the address it is at")
    message += f" ({_HINTS[status]})" if status in _HINTS else ""
    raise (EndpointError if status in _OF_THE_ENDPOINT else RemoteModelError)(message)


def _said(body: bytes) -> str:
    """The server's own words, whichever of the usual places they are in.

    >>> _said(b'{"error": {"message": "too long"}}'), _said(b'{"detail": "no"}'), _said(b"<html>oops")
    ('too long', 'no', '<html>oops')
    """
    try:
        value: Any = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
    while isinstance(value, Mapping):
        found = cast("Mapping[str, Any]", value)
        value = next((found[name] for name in ("error", "message", "detail") if found.get(name)), None)
    return value if isinstance(value, str) else body.decode(errors="replace")
