"""The ends of event time, in microseconds, and the holds that keep a watermark back."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from apache_beam.utils import timestamp

__all__ = ["MAX", "MIN", "Holds"]

MIN: int = timestamp.MIN_TIMESTAMP.micros
MAX: int = timestamp.MAX_TIMESTAMP.micros

_REMOVED_AT_LEAST = 1000  # timestamps in a heap, before the removed ones are worth dropping


class Holds:
    """A multiset of timestamps that knows its minimum. There may be millions of them, such as one for each timer.

    >>> holds = Holds()
    >>> holds.add(5); holds.add(3); holds.remove(3)
    >>> holds.minimum
    5
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._heap: list[int] = []  # the timestamps, and some that were removed

    def add(self, hold: int) -> None:
        """Add one occurrence of a timestamp."""
        hold = min(hold, MAX - 1)  # as long as there is a hold, the watermark must not reach MAX
        count = self._counts.get(hold, 0)
        self._counts[hold] = count + 1
        if not count:
            heapq.heappush(self._heap, hold)
            if len(self._heap) > 2 * len(self._counts) + _REMOVED_AT_LEAST:
                self._heap = list(self._counts)
                heapq.heapify(self._heap)

    def fill(self, holds: Iterable[int]) -> None:
        """Add many timestamps. Quicker than :meth:`add`."""
        for hold in holds:
            hold = hold if hold < MAX else MAX - 1
            self._counts[hold] = self._counts.get(hold, 0) + 1
        self._heap = list(self._counts)
        heapq.heapify(self._heap)

    def remove(self, hold: int) -> None:
        """Remove one occurrence of a timestamp that was added."""
        hold = min(hold, MAX - 1)
        count = self._counts[hold] - 1
        if count:
            self._counts[hold] = count
        else:
            del self._counts[hold]

    @property
    def minimum(self) -> int:
        """The earliest timestamp, or ``MAX`` if there is none."""
        while self._heap and self._heap[0] not in self._counts:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else MAX
