"""Sends a request a second time if its answer takes long, and takes the answer that comes first."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from luminosity.errors import InvalidArgument
from luminosity.inference.handlers.http.protocol import Response

__all__ = ["Hedging", "check_hedge"]


class Hedging:
    """Hedges requests; any number of threads may use it.

    >>> Hedging(5.0, 4).after_s
    5.0

    Args:
        after_s: seconds without an answer until the request is sent again.
        most: how many requests there may be at once, without the second ones.
    """

    def __init__(self, after_s: float, most: int) -> None:
        self.after_s = after_s
        self._threads = ThreadPoolExecutor(2 * most, "hedged-requests")

    def first(self, ask: Callable[[], Response], may_ask_again: Callable[[], bool]) -> Response:
        """Return the first answer that is no error; raise the error of the last one if there is none.

        ``ask`` sends the request and ends within its own timeout. ``may_ask_again`` is called once at most, before the
        request is sent for the second time, and never a third time. The slower one goes on by itself until it ends.
        """
        first = self._threads.submit(ask)
        if wait([first], self.after_s).done or not may_ask_again():
            return first.result()
        waiting: set[Future[Response]] = {first, self._threads.submit(ask)}
        while True:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            good = [each for each in done if each.exception() is None and each.result().status < 300]
            if good or not waiting:
                return (good or list(done))[0].result()


def check_hedge(hedge: Any, timeout: float, window: str | None) -> None:
    """Raise ``InvalidArgument`` for a hedge that never comes."""
    if isinstance(hedge, bool) or not isinstance(hedge, int | float) or not 0 < hedge < timeout:
        raise InvalidArgument(f"found hedge={hedge!r}, expected seconds above 0 and below timeout={timeout:g}")
    if window is not None:
        raise InvalidArgument("found hedge= with completion_window=, whose requests go in files")
