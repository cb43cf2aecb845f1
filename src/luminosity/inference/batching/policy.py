"""Decides when a batch is cut from the backlog, and which examples it holds."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from luminosity.inference.batching.backlog import Backlog
from luminosity.inference.batching.budget import Budget
from luminosity.inference.batching.cut import first_cut
from luminosity.inference.batching.limits import Limits
from luminosity.inference.batching.timing import Timing

__all__ = ["BatchPolicy", "Cut"]

_SHORTEST_LINGER_S = 0.001  # enough for a session to submit its next block
_LONGEST_LINGER_S = 0.05  # a longer wait would be noticed by a client of a service


@dataclass(frozen=True)
class Cut:
    """A range of the sorted backlog, and the budget it was cut by."""

    start: int
    count: int
    budget: float


class BatchPolicy:
    """Decides on the next batch; changes nothing itself, and gets the time from its caller."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.timing = Timing()
        self.budget = Budget(limits, self.timing)

    def next(
        self, backlog: Backlog, now: float, more_coming: bool, awaited: bool = False, idle: bool = False
    ) -> Cut | float | None:
        """Return the next batch, or the most seconds to wait for a better one, or None if nothing waits.

        Args:
            backlog: the waiting examples.
            now: the time.
            more_coming: whether a session may submit more examples before it waits for outcomes.
            awaited: whether a session that submitted some of these examples waits for their outcomes.
            idle: whether the device is idle; it gains nothing by waiting, as later examples form its next batch.
        """
        if not len(backlog):
            return None
        oldest = int(np.argmin(backlog.since))
        waited = now - float(backlog.since[oldest])
        patience = self._patience(backlog, awaited)
        in_no_hurry = self.limits.max_wait is not None or patience == math.inf or not self.timing.known
        left = (_SHORTEST_LINGER_S if idle and not in_no_hurry else patience) - waited
        if more_coming and left > 0 and not self._enough(backlog):
            return left
        # The most costly come first. If the backlog is refilled all the time, the others would wait forever, so an
        # example that has waited too long comes before them.
        return self._cut(backlog, oldest if waited >= patience else 0)

    def _patience(self, backlog: Backlog, awaited: bool) -> float:
        """Return how long an example may wait for others."""
        if self.limits.max_wait is not None:
            return self.limits.max_wait
        if len(backlog) < self.limits.min_count and not awaited:
            return math.inf  # The author wants full batches and set no other bound: until the bundle ends.
        expected = self.timing.seconds(self.budget.limit(float(backlog.costs[0])))
        return min(max(expected, _SHORTEST_LINGER_S), _LONGEST_LINGER_S)

    def _enough(self, backlog: Backlog) -> bool:
        """Return whether the backlog fills a batch."""
        if len(backlog) < self.limits.min_count:
            return False
        full = backlog.costs.sum() >= self.budget.limit(float(backlog.costs[0]))
        return full or len(backlog) >= self.limits.max_count or float(backlog.weights.sum()) >= self.limits.max_weight

    def _cut(self, backlog: Backlog, start: int) -> Cut:
        costs = backlog.costs[start:]
        costs = costs[: self._same_bucket(costs)]
        budget = self.budget.limit(float(costs[0]))
        most = min(self.limits.max_count, len(costs), self._light_enough(backlog.weights[start:]))
        if costs[0] > 0:
            most = min(most, int(budget // costs[0]))
        least = min(self.limits.min_count, most)
        count = max(first_cut(costs, most, self.timing.overhead), least, 1)
        return Cut(start, count, budget)

    def _same_bucket(self, costs: np.ndarray) -> int:
        boundaries = self.limits.boundaries
        bucket = bisect_right(boundaries, costs[0])
        if not boundaries or bucket == 0:
            return len(costs)
        return int(np.searchsorted(-costs, -boundaries[bucket - 1], side="right"))

    def _light_enough(self, weights: np.ndarray) -> int:
        if self.limits.weigh is None:
            return len(weights)
        return max(1, int(np.searchsorted(np.cumsum(weights), self.limits.max_weight, side="right")))
