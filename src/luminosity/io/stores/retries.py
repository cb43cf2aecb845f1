"""Requests to servers that are repeated while a server fails."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from luminosity.errors import StoreError

__all__ = ["TransientError", "retry"]

_FIRST_DELAY_S = 0.1  # doubled after every attempt
_LONGEST_DELAY_S = 10.0  # a server that is back is noticed within this time
_MOST_DOUBLINGS = 10  # beyond these, the delay is at its longest anyway

T = TypeVar("T")


class TransientError(Exception):
    """The server may accept the request later; ``wait`` is the number of seconds that it asks for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


def retry(
    send: Callable[[], T],
    timeout: float,
    on_retry: Callable[[], None],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return the result of ``send``, which is retried after a ``TransientError`` for ``timeout`` seconds.

    ``on_retry`` is called before every retry. Blocks between attempts.

    >>> responses = iter([TransientError("busy"), TransientError("busy", wait=1), "done"])
    >>> waits = []
    >>> def send():
    ...     response = next(responses)
    ...     if isinstance(response, TransientError):
    ...         raise response
    ...     return response
    >>> retry(send, 60, lambda: None, waits.append), len(waits), waits[1] >= 1
    ('done', 2, True)
    """
    give_up_at = time.monotonic() + timeout
    attempts = 0
    while True:
        try:
            return send()
        except TransientError as error:
            attempts += 1
            # The random spread keeps workers that failed together from retrying together.
            delay = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(attempts, _MOST_DOUBLINGS)) * random.uniform(0.5, 1)
            delay = max(delay, error.wait)
            if time.monotonic() + delay > give_up_at:
                raise StoreError(
                    f"{error}; gave up after {attempts} attempts in {timeout:.3g} s", may_pass=True
                ) from error
        on_retry()
        sleep(delay)
