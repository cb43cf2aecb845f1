"""How quickly something goes on, lately."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 10.0
_POINT_EVERY_S = 0.5
_FEWEST_STEPS = 4  # slow things change seldom: their pace is that of their last few steps, however long ago
_MOST_POINTS = int(_WINDOW_S / _POINT_EVERY_S) + _FEWEST_STEPS + 2


class Pace:
    """
    >>> pace = Pace(began_at=0.0)
    >>> for second in range(1, 31):
    ...     pace.reached(second, 5 * second)
    >>> pace.per_second(30)
    5.0
    """

    def __init__(self, began_at: float) -> None:
        self._points: deque[tuple[float, float]] = deque([(began_at, 0.0)], maxlen=_MOST_POINTS)

    def reached(self, seconds: float, amount: float) -> None:
        """At ``seconds``, ``amount`` was done in all."""
        last_seconds, last_amount = self._points[-1]
        if amount != last_amount and (seconds - last_seconds >= _POINT_EVERY_S or len(self._points) == 1):
            self._points.append((seconds, amount))

    def per_second(self, now: float) -> float:
        points = list(self._points)
        candidates = range(len(points) - 1 - _FEWEST_STEPS, 0, -1)
        first = next((i for i in candidates if points[i][0] <= now - _WINDOW_S), 0)
        first_seconds, first_amount = points[first]
        last_seconds, last_amount = points[-1]
        # A step that is under way has no amount yet: its time counts only once it is longer than they usually are.
        usual = (last_seconds - first_seconds) / max(1, len(points) - 1 - first)
        elapsed = max(last_seconds, now - usual) - first_seconds
        return (last_amount - first_amount) / elapsed if elapsed > 0 else 0.0
