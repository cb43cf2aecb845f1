"""Asking a server again that has trouble, for a while."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from luminosity.errors import StoreError

__all__ = ["Trouble", "asked_patiently"]

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 10.0

T = TypeVar("T")


class Trouble(Exception):
    """The server may do better later; `wait` is how many seconds it asks for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


def asked_patiently(
    ask: Callable[[], T],
    timeout: float,
    on_retry: Callable[[], None],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """The answer of `ask`, which is tried again after `Trouble` until so many seconds have passed.

    >>> answers = iter([Trouble("busy"), Trouble("busy", wait=1), "done"])
    >>> waits = []
    >>> def ask():
    ...     answer = next(answers)
    ...     if isinstance(answer, Trouble):
    ...         raise answer
    ...     return answer
    >>> asked_patiently(ask, 60, lambda: None, waits.append), len(waits), waits[1] >= 1
    ('done', 2, True)
    """
    give_up_at = time.monotonic() + timeout
    tries = 0
    while True:
        try:
            return ask()
        except Trouble as trouble:
            tries += 1
            # The spread keeps workers that failed together from coming back together.
            delay = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(tries, 10)) * random.uniform(0.5, 1)
            delay = max(delay, trouble.wait)
            if time.monotonic() + delay > give_up_at:
                raise StoreError(f"{trouble}; gave up after {tries} tries in {timeout:.3g} s") from trouble
        on_retry()
        sleep(delay)
