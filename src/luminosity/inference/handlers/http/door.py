"""A server that turns everyone away is asked now and then, not by every batch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from luminosity.errors import EndpointError, RemoteModelError

__all__ = ["Door"]

_SHUT_S = 10.0
_FAILURES = 8
"""More than a batch of 64 is halved: one example that hangs the server must not take its neighbours along."""


class Door:
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
