"""Where to cut the sorted backlog of examples into batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["first_cut"]

_SMALL_BACKLOG = 128  # examples; finding the best partition takes quadratic time


def first_cut(costs: npt.NDArray[Any], most: int, overhead: float) -> int:
    """Return how many examples from the front, the most costly, go into the next batch.

    A batch takes the time of its most costly example times their number. So one more example costs padding, and
    leaving it costs a share of another batch. A small backlog is cut so that all of its batches together take the
    least time. In a large one, the batch that does the most useful work per second is as good to a few percent, and
    quicker to find. Of equally good batches the largest is chosen.

    Args:
        costs: of the waiting examples, falling.
        most: how many examples the budget allows.
        overhead: the fixed cost of one more batch.

    >>> first_cut(np.array([50.0, 49.0, 48.0, 2.0, 2.0, 2.0]), 6, overhead=5.0)
    3
    >>> first_cut(np.array([50.0, 49.0, 48.0, 2.0, 2.0, 2.0]), 6, overhead=500.0)
    6
    """
    waiting = len(costs)
    if waiting <= 1 or most <= 1:
        return min(waiting, 1)
    if costs[0] == costs[-1]:
        return min(waiting, most)  # Nothing to pad.
    if waiting <= _SMALL_BACKLOG:
        return _best_of_all(costs, most, overhead)
    front = costs[:most]
    useful = np.cumsum(front)
    padded = front[0] * np.arange(1, len(front) + 1)
    return len(front) - int(np.argmax((useful / np.maximum(overhead + padded, 1e-9))[::-1]))


def _best_of_all(costs: npt.NDArray[Any], most: int, overhead: float) -> int:
    """Return the first batch of the best partition, by dynamic programming from the least costly end."""
    waiting = len(costs)
    budget = most * costs[0]
    counts = np.arange(1, waiting + 1)
    best = np.zeros(waiting + 1)
    count = 1
    for start in range(waiting - 1, -1, -1):
        longest = costs[start]
        fits = waiting - start if longest <= 0 else min(waiting - start, max(1, int(budget // longest)))
        time = best[start + 1 : start + fits + 1] + overhead + longest * counts[:fits]
        count = fits - int(np.argmin(time[::-1]))
        best[start] = time[count - 1]
    return min(count, most)
