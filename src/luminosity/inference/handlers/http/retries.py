"""What a server's status means for the request: fine, again, these examples' fault, or nobody's but the endpoint's."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, cast

from luminosity.errors import EndpointError, RemoteModelError
from luminosity.inference.handlers.http.protocol import Reply

__all__ = ["Busy", "CircuitBreaker", "check_status", "delay", "retry_after"]


_AGAIN = {408, 429, 502, 503, 504}
_HINTS = {
    401: "is the key right? api_key_env names the variable that holds it",
    403: "may this key use this model?",
    404: "are the address and the model's name right?",
    405: "is this the address of such a server?",
    413: "a smaller max_batch_size makes smaller requests",
}
_OF_THE_ENDPOINT = {401, 403, 404, 405, 407, 410, 426, 501}

_FIRST_S = 0.5
_MOST_S = 30.0

_SHUT_S = 10.0
_FAILURES = 8
"""More than a batch of 64 is halved: one example that hangs the server must not take its neighbours along."""


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


def delay(tries: int, asked: float | None, dice: random.Random) -> float:
    """Anything up to a bound that doubles with each try, so that those who failed together don't come back together.

    What the server `asked` for is waited in full, and a little more for the same reason.

    >>> delay(1, None, random.Random(0)) <= 0.5, 7 <= delay(1, 7.0, random.Random(0)) <= 7.5
    (True, True)
    """
    bound = min(_MOST_S, _FIRST_S * 2 ** min(tries - 1, 30))
    return dice.uniform(0, bound) if asked is None else asked + dice.uniform(0, _FIRST_S)


def retry_after(header: str | None, now: datetime | None = None) -> float | None:
    """The header `Retry-After` in seconds from now; None where it says nothing that can be read.

    >>> retry_after("12"), retry_after("soon"), retry_after(None)
    (12.0, None, None)
    >>> retry_after("Wed, 21 Oct 2015 07:28:10 GMT", datetime(2015, 10, 21, 7, 28, tzinfo=timezone.utc))
    10.0
    """
    text = (header or "").strip()
    if text.isdecimal():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    date = date if date.tzinfo else date.replace(tzinfo=timezone.utc)
    return max(0.0, (date - (now or datetime.now(timezone.utc))).total_seconds())


class CircuitBreaker:
    """Tells the endpoint's faults from those of examples; remembers the former, so that others need not find out again.

    An endpoint that has answered others can't be all wrong: firewalls forbid single texts, and one may hang a server.
    Then the examples are to blame, until many requests in a row have failed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._shut_until = -math.inf
        self._why = ""
        self._in_a_row = 0
        self._answered_at = -math.inf

    def check(self) -> None:
        """Raise what the endpoint's fault was, if that is not long ago."""
        with self._lock:
            if self._clock() < self._shut_until:
                raise EndpointError(self._why)

    def answered(self) -> None:
        with self._lock:
            self._in_a_row = 0
            self._answered_at = self._clock()

    def refused(self, message: str) -> RemoteModelError:
        """The server does not want this request, or is no such server."""
        return self._failed(message, since=-math.inf)

    def gave_up(self, message: str, by_examples: bool, began: float) -> RemoteModelError:
        """A request was tried from then on, until its deadline."""
        return self._failed(message, math.inf if by_examples else began)

    def _failed(self, message: str, since: float) -> RemoteModelError:
        """The endpoint's fault if no other request was answered `since`, or too many failed."""
        with self._lock:
            self._in_a_row += 1
            nobody_answered = self._answered_at <= since < math.inf
            if not nobody_answered and self._in_a_row < _FAILURES:
                return RemoteModelError(message)
            self._shut_until, self._why = self._clock() + _SHUT_S, message
            return EndpointError(message)
