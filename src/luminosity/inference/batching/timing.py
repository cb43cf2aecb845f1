"""How long a batch takes, learned from earlier batches."""

from __future__ import annotations

from collections import deque

import numpy as np

__all__ = ["Timing"]

_REMEMBERED = 48  # batches; their pairs are compared each time
_LEARN_EVERY = 4  # batches, once a quarter of those remembered have been seen


class Timing:
    """Models the seconds of a batch as a line over its padded cost: a fixed part, and a part per unit of cost.

    The line is the median of all lines through two batches (Theil and Sen), so that single slow batches, which another
    process disturbed or which compiled something, don't bend it.

    >>> timing = Timing()
    >>> for cost in (10, 20, 40, 80):
    ...     timing.observe(cost, 0.5 + 0.01 * cost)
    >>> round(timing.fixed, 3), round(timing.per_cost, 3), round(timing.overhead)
    (0.5, 0.01, 50)
    """

    def __init__(self) -> None:
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._observed = 0
        self.fixed = 0.0
        self.per_cost = 0.0
        self.known = False
        """Whether batches differed enough to separate the fixed part from the rest."""

    @property
    def overhead(self) -> float:
        """The fixed part in units of cost."""
        return self.fixed / self.per_cost if self.known else 0.0

    def seconds(self, cost: float) -> float:
        """Return the expected seconds of a batch with this padded cost."""
        return self.fixed + self.per_cost * cost

    def observe(self, cost: float, seconds: float) -> None:
        """Learn from a batch of this padded cost that took this long."""
        self._costs.append(cost)
        self._seconds.append(seconds)
        self._observed += 1
        if self._observed <= _REMEMBERED // 4 or self._observed % _LEARN_EVERY == 0:
            self._learn()

    def _learn(self) -> None:
        costs, seconds = np.maximum(self._costs, 1e-9), np.array(self._seconds)
        first, second = np.triu_indices(len(costs), 1)
        apart = costs[second] - costs[first]
        telling = np.abs(apart) > 0.1 * costs.max()
        mean_rate = float(np.median(seconds / costs))
        if not telling.any() or mean_rate <= 0:
            if not self.known:
                self.per_cost = mean_rate
            return  # Keep the last line: a settled budget makes all batches alike.
        self.known = True
        slope = float(np.median((seconds[second] - seconds[first])[telling] / apart[telling]))
        # A device that is far from full takes the same time for more work; then the slope is 0, or below by chance.
        self.per_cost = max(slope, 0.01 * mean_rate)
        self.fixed = max(0.0, float(np.median(seconds - self.per_cost * costs)))
