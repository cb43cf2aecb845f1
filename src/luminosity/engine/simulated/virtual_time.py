"""Virtual time: what will happen, in its order, and the clock and the queue with which the loop lives in it."""

from __future__ import annotations

import heapq
import itertools
import queue
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["TICK_S", "Stuck", "VirtualClock", "VirtualMailbox", "VirtualTime"]

TICK_S = 1e-6  # a look at the clock takes this long: no loop that waits for a deadline lasts forever


class Stuck(Exception):
    """Everything waits, and nothing will ever happen."""


class VirtualTime:
    """Runs functions at their times, while the loop waits. The thread that made it calls everything."""

    def __init__(self, tick: float = TICK_S) -> None:
        self.now = 0.0
        self.tick = tick
        self.on_message: Callable[[bool], None] = lambda _: None  # see VirtualMailbox
        self.clock = VirtualClock(self)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def look(self) -> float:
        """Return the time. A look takes a moment."""
        self.now += self.tick
        return self.now

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function after so many seconds. Functions for the same time are called in their order."""
        self.at_time(self.now + seconds, call)

    def at_time(self, time: float, call: Callable[[], None]) -> None:
        """Call a function at a time, or now if it has passed."""
        heapq.heappush(self._events, (max(self.now, time), next(self._numbers), call))

    def wait(self, is_done: Callable[[], bool], timeout: float | None) -> bool:
        """Let happen what is due until ``is_done``, or until the timeout. Returns whether it is done.

        Raises :class:`Stuck` if there is no timeout and nothing will happen any more.
        """
        if is_done():
            return True
        return self._run_events(is_done, float("inf") if timeout is None else self.now + max(0.0, timeout))

    def wake(self) -> None:
        """Note that something has changed for which others may wait."""

    def close(self) -> None:
        """Forget what would happen."""
        self._events.clear()

    def _run_events(self, is_done: Callable[[], bool], until: float) -> bool:
        events = self._events
        while not is_done():
            if not events or events[0][0] > until:
                if until == float("inf"):
                    raise Stuck("everything waits, and nothing will happen any more")
                self.now = max(self.now, until)
                return False
            at, _, call = heapq.heappop(events)
            self.now = max(self.now, at)
            call()
        return True


class VirtualClock:
    """The clock of virtual time. Its wall time may jump."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.monotonic = self.thread_time = time.look
        self.wall = 1_700_000_000.0  # seconds since 1970 at the start
        self.set_back = 0.0  # by how many seconds it has jumped back in all: timers wait so much longer

    def jump(self, seconds: float) -> None:
        """Move the wall time."""
        self.wall += seconds
        self.set_back += max(0.0, -seconds)

    def time(self) -> float:
        """Return the wall time."""
        return self.wall + self._time.look()

    def micros(self) -> int:
        """Return the wall time in microseconds since 1970."""
        return int(self.time() * 1e6)

    def sleep(self, seconds: float, /) -> None:
        """Let time pass."""
        self._time.wait(_never, seconds)


def _never() -> bool:
    return False


class VirtualMailbox:
    """A queue whose reader waits in virtual time.

    Before each look of its reader, ``on_message`` of the time gets whether the last one has found a message.
    """

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._items: deque[Any] = deque()
        self._has_given = False  # a message, since ``on_message`` was called

    def put(self, item: Any) -> None:
        """Add a message."""
        self._items.append(item)
        self._time.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the oldest message. Raises ``queue.Empty`` if there is none, after the timeout if ``block`` is set."""
        self._time.on_message(self._has_given)
        self._has_given = False
        if block and not self._items:
            self._time.wait(self._has_items, timeout)
        if not self._items:
            raise queue.Empty
        self._has_given = True
        return self._items.popleft()

    def get_nowait(self) -> Any:
        """Return the oldest message. Raises ``queue.Empty`` if there is none."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Return whether there is no message."""
        return not self._items

    def _has_items(self) -> bool:
        return bool(self._items)
