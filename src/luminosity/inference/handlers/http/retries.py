"""Decides which failed requests are retried, when, and when an endpoint counts as broken."""

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
from luminosity.inference.handlers.http.protocol import Response

__all__ = ["CircuitBreaker", "RetryableError", "check_status", "delay"]


_RETRYABLE = {408, 429, 502, 503, 504}
_FIXES = {
    401: "check the key in the environment variable that api_key_env names",
    403: "check that this key may use this model",
    404: "check the address and the model's name",
    405: "check that this is the address of a server with this protocol",
    413: "pass a smaller max_batch_size, which makes requests smaller",
}
_ENDPOINT_AT_FAULT = {401, 403, 404, 405, 407, 410, 426, 501}

_FIRST_S = 0.5  # the longest wait before the first retry
_MOST_S = 30.0  # the longest wait before any retry

_OPEN_S = 10.0  # how long no request is sent after the endpoint failed
_FAILURES = 8
"""Failures in a row that open the circuit. A batch of 64 is halved 6 times: one bad example must not open it."""


class RetryableError(Exception):
    """A failed request that may succeed later.

    ``by_examples`` says that its examples may be the cause, for example because they bring the server down.
    ``retry_after_s`` is how long the server asks to wait. ``is_throttled`` says that it asks to send less, and
    ``may_cost`` that the server may have computed an answer that did not arrive.
    """

    def __init__(
        self,
        message: str,
        by_examples: bool = True,
        retry_after_s: float | None = None,
        is_throttled: bool = False,
        may_cost: bool = True,
    ) -> None:
        super().__init__(message)
        self.by_examples = by_examples
        self.retry_after_s = retry_after_s
        self.is_throttled = is_throttled
        self.may_cost = may_cost


def check_status(response: Response) -> None:
    """Raise the error that a status other than success means."""
    status = response.status
    if 200 <= status < 300:
        return
    text = response.quoted(_error_text(response.body))
    message = f"{response.url} answered {status}" + (f": {text}" if text else "")
    if status in _RETRYABLE:
        wait = retry_after(response.headers.get("retry-after"))
        is_throttled = status == 429 or (status == 503 and wait is not None)
        by_examples = status != 429
        raise RetryableError(message, by_examples, retry_after_s=wait, is_throttled=is_throttled, may_cost=False)
    if 300 <= status < 400:
        raise EndpointError(
            f"{response.url} answered {status}, a redirect", fix="pass the address to which the server redirects"
        )
    kind = EndpointError if status in _ENDPOINT_AT_FAULT else RemoteModelError
    raise kind(message, fix=_FIXES.get(status), may_pass=status >= 500)


def _error_text(body: bytes) -> str:
    """Return the server's own words, whichever of the usual places they are in.

    >>> _error_text(b'{"error": {"message": "too long"}}'), _error_text(b'{"detail": "no"}'), _error_text(b"<html>oops")
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


def delay(attempts: int, retry_after_s: float | None, dice: random.Random) -> float:
    """Return how many seconds to wait before the next attempt.

    The wait is random, up to a bound that doubles with each attempt: requests that failed together must not come back
    together. If the server asks for a wait, that is waited in full, plus a short random time.

    >>> delay(1, None, random.Random(0)) <= 0.5, 7 <= delay(1, 7.0, random.Random(0)) <= 7.5
    (True, True)
    """
    bound = min(_MOST_S, _FIRST_S * 2 ** min(attempts - 1, 30))
    return dice.uniform(0, bound) if retry_after_s is None else retry_after_s + dice.uniform(0, _FIRST_S)


def retry_after(header: str | None, now: datetime | None = None) -> float | None:
    """Return the header ``Retry-After`` in seconds from now, or None if it can't be read.

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
    """Stops requests to a broken endpoint for some seconds, and decides if the endpoint or the examples are at fault.

    An endpoint that has responded to other requests is probably right: firewalls forbid single texts, and one text may
    hang a server. Then the examples are at fault, until many requests in a row have failed. Any thread may call it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open_until = -math.inf
        self._reason = EndpointError()
        self._failures_in_a_row = 0
        self._succeeded_at = -math.inf

    def check(self) -> None:
        """Raise the endpoint's last error if it is recent."""
        with self._lock:
            if self._clock() < self._open_until:
                raise EndpointError(self._reason.message, fix=self._reason.fix, may_pass=self._reason.may_pass)

    def succeeded(self) -> None:
        """Record a response that could be used, or that blames its examples."""
        with self._lock:
            self._failures_in_a_row = 0
            self._succeeded_at = self._clock()

    def refused(self, error: EndpointError) -> RemoteModelError:
        """Return what to raise for a request that the server rejects or does not understand."""
        return self._failed(error, since=-math.inf)

    def gave_up(self, message: str, by_examples: bool, began: float) -> RemoteModelError:
        """Return what to raise for a request that was retried from ``began`` until its deadline."""
        return self._failed(EndpointError(message, may_pass=True), math.inf if by_examples else began)

    def _failed(self, error: EndpointError, since: float) -> RemoteModelError:
        """Blame the endpoint if no other request has succeeded after ``since``, or too many have failed."""
        with self._lock:
            self._failures_in_a_row += 1
            none_succeeded = self._succeeded_at <= since < math.inf
            if not none_succeeded and self._failures_in_a_row < _FAILURES:
                return RemoteModelError(error.message, fix=error.fix, may_pass=error.may_pass)
            self._open_until, self._reason = self._clock() + _OPEN_S, error
            return EndpointError(error.message, fix=error.fix, may_pass=error.may_pass)
