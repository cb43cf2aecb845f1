"""Where to cut a sorted pool of examples into batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["first_cut"]

_SMALL_POOL = 128


def first_cut(costs: npt.NDArray[Any], most: int, overhead: float) -> int:
    """How many examples from the front, the longest, go into the next batch.

    ``costs`` fall; ``most`` is what the budget lets through; ``overhead`` is what one more batch costs. A batch takes
    the time of its longest example times their number, so one more example costs padding, and leaving it costs a
    share of another batch.

    A small pool is cut so that all of its batches together take the least time. In a large one the batch that does
    the most useful work per second is as good to a few percent, and quicker to find. Of equals the largest: with
    nothing to lose, fewer batches.

    >>> first_cut(np.array([50.0, 49.0, 48.0, 2.0, 2.0, 2.0]), 6, overhead=5.0)
    3
    >>> first_cut(np.array([50.0, 49.0, 48.0, 2.0, 2.0, 2.0]), 6, overhead=500.0)
    6
    """
    pool = len(costs)
    if pool <= 1 or most <= 1:
        return min(pool, 1)
    if costs[0] == costs[-1]:
        return min(pool, most)  # Nothing to pad.
    if pool <= _SMALL_POOL:
        return _best_of_all(costs, most, overhead)
    front = costs[:most]
    useful = np.cumsum(front)
    padded = front[0] * np.arange(1, len(front) + 1)
    return len(front) - int(np.argmax((useful / np.maximum(overhead + padded, 1e-9))[::-1]))


def _best_of_all(costs: npt.NDArray[Any], most: int, overhead: float) -> int:
    """The first batch of the best partition, found from the short end: the best of each shorter rest is known."""
    pool = len(costs)
    budget = most * costs[0]
    counts = np.arange(1, pool + 1)
    best = np.zeros(pool + 1)
    count = 1
    for start in range(pool - 1, -1, -1):
        longest = costs[start]
        fits = pool - start if longest <= 0 else min(pool - start, max(1, int(budget // longest)))
        time = best[start + 1 : start + fits + 1] + overhead + longest * counts[:fits]
        count = fits - int(np.argmin(time[::-1]))
        best[start] = time[count - 1]
    return min(count, most)
