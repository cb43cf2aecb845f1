"""When a batch leaves the pool, and what is in it."""

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

_SHORTEST_LINGER_S = 0.001
_LONGEST_LINGER_S = 0.05


@dataclass(frozen=True)
class Cut:
    """A range of the sorted pool, and the budget it was cut by."""

    start: int
    count: int
    budget: float


class BatchPolicy:
    """Decides; does nothing itself, and knows the time only from its caller."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.timing = Timing()
        self.budget = Budget(limits, self.timing)

    def next(
        self, pool: Backlog, now: float, more_coming: bool, awaited: bool = False, idle: bool = False
    ) -> Cut | float | None:
        """The next batch; or how many seconds to wait, at most, for a better one; or None, for there is nothing.

        ``awaited``: someone who handed over some of these can't go on without them. An ``idle`` device gains nothing by
        waiting: what comes meanwhile is its next batch.
        """
        if not len(pool):
            return None
        oldest = int(np.argmin(pool.since))
        waited = now - float(pool.since[oldest])
        patience = self._patience(pool, awaited)
        in_no_hurry = self.limits.max_wait is not None or patience == math.inf or not self.timing.known
        left = (_SHORTEST_LINGER_S if idle and not in_no_hurry else patience) - waited
        if more_coming and left > 0 and not self._enough(pool):
            return left
        # Longest first; but where the pool is refilled all the time those are always few, and the others would wait.
        return self._cut(pool, oldest if waited >= patience else 0)

    def _patience(self, pool: Backlog, awaited: bool) -> float:
        """How long an example may wait for company."""
        if self.limits.max_wait is not None:
            return self.limits.max_wait
        if len(pool) < self.limits.min_count and not awaited:
            return math.inf  # Asked for, and no other bound was given: until its bundle ends.
        expected = self.timing.seconds(self.budget.limit(float(pool.costs[0])))
        return min(max(expected, _SHORTEST_LINGER_S), _LONGEST_LINGER_S)

    def _enough(self, pool: Backlog) -> bool:
        """Whether what is here fills a batch."""
        if len(pool) < self.limits.min_count:
            return False
        full = pool.costs.sum() >= self.budget.limit(float(pool.costs[0]))
        return full or len(pool) >= self.limits.max_count or float(pool.weights.sum()) >= self.limits.max_weight

    def _cut(self, pool: Backlog, start: int) -> Cut:
        costs = pool.costs[start:]
        costs = costs[: self._same_bucket(costs)]
        budget = self.budget.limit(float(costs[0]))
        most = min(self.limits.max_count, len(costs), self._light_enough(pool.weights[start:]))
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
