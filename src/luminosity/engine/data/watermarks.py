"""The ends of event time, in microseconds, and the holds that keep a watermark back."""

from __future__ import annotations

from apache_beam.utils import timestamp

__all__ = ["MAX", "MIN", "Holds"]

MIN: int = timestamp.MIN_TIMESTAMP.micros
MAX: int = timestamp.MAX_TIMESTAMP.micros


class Holds:
    """A multiset of timestamps that knows its minimum.

    >>> holds = Holds()
    >>> holds.add(5); holds.add(3); holds.remove(3)
    >>> holds.minimum
    5
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, hold: int) -> None:
        """Add one occurrence of a timestamp."""
        hold = min(hold, MAX - 1)  # as long as there is a hold, the watermark must not reach MAX
        self._counts[hold] = self._counts.get(hold, 0) + 1

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
        return min(self._counts, default=MAX)
