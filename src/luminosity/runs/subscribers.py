"""Delivery of a run's events to subscribers, none of which can hold up or break the run."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable

from luminosity.events import Event, Snapshot, Subscriber

__all__ = ["EventStream"]


_LOGGER = logging.getLogger(__name__)

_MOST_WAITING = 1000  # events for a slow subscriber; older ones are dropped
_END_TIMEOUT_S = 5.0  # for slow subscribers at the end of a run


class EventStream:
    """Delivers every event to every subscriber, in order, each on a thread of its own.

    A slow subscriber misses all but the newest of the snapshots that wait for it. A subscriber that raises gets no more
    events.
    """

    def __init__(self, subscribers: Iterable[Subscriber]) -> None:
        self._subscriptions = [_Subscription(subscriber) for subscriber in subscribers]

    @property
    def is_heard(self) -> bool:
        """True if there is any subscriber."""
        return bool(self._subscriptions)

    def emit(self, event: Event) -> None:
        """Queue ``event`` for every subscriber. Does not block."""
        for subscription in self._subscriptions:
            subscription.put(event)

    def close(self) -> None:
        """Wait until all events are delivered, but only for a few seconds."""
        deadline = time.monotonic() + _END_TIMEOUT_S
        for subscription in self._subscriptions:
            subscription.end()
        for subscription in self._subscriptions:
            subscription.join(deadline)


class _Subscription:
    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._is_ending = False
        self._is_late = False
        self._thread = threading.Thread(target=self._serve, name="luminosity-events", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        with self._changed:
            if self._is_ending:
                return
            if isinstance(event, Snapshot) and self._waiting and isinstance(self._waiting[-1], Snapshot):
                self._waiting.pop()
            if len(self._waiting) >= _MOST_WAITING:
                self._waiting.popleft()
                self._is_late = True
            self._waiting.append(event)
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            _LOGGER.warning("%r has not returned; the run ends without it", self._subscriber)
        elif self._is_late:
            _LOGGER.warning("%r was too slow: it did not get every event", self._subscriber)

    def _serve(self) -> None:
        while (event := self._next()) is not None:
            try:
                self._subscriber(event)
            except Exception:
                _LOGGER.warning("%r raised; it gets no more events", self._subscriber, exc_info=True)
                self.end()
                return

    def _next(self) -> Event | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ending)
            return self._waiting.popleft() if self._waiting else None
