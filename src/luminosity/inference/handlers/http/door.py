"""A server that turns everyone away is asked now and then, not by every batch."""

from __future__ import annotations

import threading
from collections.abc import Callable

from luminosity.errors import EndpointError, RemoteModelError

__all__ = ["Door"]

_SHUT_S = 10.0
_FAILURES = 8
"""More than a batch of 64 is halved: one example that hangs the server must not take its neighbours along."""


class Door:
    """Remembers for a while that the endpoint itself is at fault, so that others need not find out again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._shut_until = 0.0
        self._why = ""
        self._in_a_row = 0

    def check(self) -> None:
        with self._lock:
            if self._why and self._clock() < self._shut_until:
                raise EndpointError(self._why)

    def answered(self) -> None:
        with self._lock:
            self._in_a_row = 0

    def shut(self, error: EndpointError) -> None:
        with self._lock:
            self._shut_until, self._why = self._clock() + _SHUT_S, str(error)

    def gave_up(self, message: str, by_examples: bool) -> RemoteModelError:
        """A request was tried until its deadline. Where many were, with no answer to any other, it is not them."""
        with self._lock:
            self._in_a_row += 1
            if by_examples and self._in_a_row < _FAILURES:
                return RemoteModelError(message)
        error = EndpointError(message)
        self.shut(error)
        return error
