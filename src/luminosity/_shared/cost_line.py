"""Learns what a piece of work costs from earlier pieces: a fixed price plus a price per unit."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import TypeVar

import numpy as np

__all__ = ["CostLine"]

Size = TypeVar("Size", float, np.ndarray)

_CUT_APART = 0.25  # by which part of the longer one two times must differ, if a piece was cut
_FADE = 0.8  # of the fixed part is left after each time that it could not be told
_LEARN_EVERY = 4  # observations, once a quarter of those remembered have been made


@cache  # of at most as many lengths as observations are remembered
def _pairs(length: int) -> tuple[np.ndarray, ...]:
    return np.triu_indices(length, 1)


def _median(values: np.ndarray) -> float:
    """Return the median of some values. For as few as are remembered, it takes a fifth of NumPy's own time."""
    ordered, half = np.sort(values), len(values) // 2
    return float(ordered[half]) if len(ordered) % 2 else 0.5 * float(ordered[half - 1] + ordered[half])


class CostLine:
    """Models the seconds of a batch or bundle as a line over its size: a fixed part, and a part per unit.

    The line is the median of all lines through two observations (Theil and Sen), so that single slow ones, which
    another process disturbed or which compiled something, don't bend it. Only the last ``remembered`` observations
    count.

    Args:
        remembered: the number of observations.
        follows_time: whether sizes follow from the time that earlier pieces took, as those of bundles do. Then only
            sizes are compared of which one is twice the other, because smaller differences come from the spread of
            costs. And the fixed part fades while it can't be told, until sizes change so that it can.

    >>> line = CostLine()
    >>> for size in (10, 20, 40, 80):
    ...     line.observe(size, 0.5 + 0.01 * size)
    >>> round(line.fixed, 3), round(line.per_unit, 3), round(line.overhead)
    (0.5, 0.01, 50)
    """

    def __init__(self, remembered: int = 48, *, follows_time: bool = False) -> None:
        self._follows_time = follows_time
        self._sizes: deque[float] = deque(maxlen=remembered)
        self._was_cut: deque[bool] = deque(maxlen=remembered)
        self._seconds: deque[float] = deque(maxlen=remembered)
        self._often_until = remembered // 4
        self.observed = 0
        self.fixed = 0.0
        self.per_unit = 0.0
        self.noise = 0.0
        """How many seconds observations usually differ from the line."""
        self.known = False
        """Whether sizes differed enough to separate the fixed part from the rest."""

    @property
    def overhead(self) -> float:
        """The fixed part in units."""
        return self.fixed / self.per_unit if self.known else 0.0

    def seconds(self, size: Size) -> Size:
        """Return the expected seconds for this size, or for each of several."""
        return self.fixed + self.per_unit * size

    def observe(self, size: float, seconds: float, *, was_cut: bool = False) -> None:
        """Learn from a piece of work of this size that took this long.

        ``was_cut`` says that the time had run out, so that the size follows from the time. Another one that took
        equally long then says nothing about the fixed part, whatever its size.
        """
        self._sizes.append(size)
        self._was_cut.append(was_cut)
        self._seconds.append(seconds)
        self.observed += 1
        if self.observed <= self._often_until or self.observed % _LEARN_EVERY == 0:
            self._learn()

    def _learn(self) -> None:
        sizes, seconds = np.maximum(self._sizes, 1e-9), np.array(self._seconds)
        first, second = _pairs(len(sizes))
        size, other_size = sizes[first], sizes[second]
        apart = other_size - size
        smallest = 0.5 * np.maximum(other_size, size) if self._follows_time else 0.1 * sizes.max()
        telling = np.abs(apart) > smallest
        longer = seconds[second] - seconds[first]
        if telling.any():  # seldom, once sizes have settled
            were_cut = np.array(self._was_cut)
            either_cut = were_cut[second] | were_cut[first]
            longest = np.maximum(seconds[second], seconds[first])
            telling &= ~either_cut | (np.abs(longer) > _CUT_APART * longest)
        mean_rate = _median(seconds / sizes)
        if not telling.any() or mean_rate <= 0:
            if not self.known:
                self.per_unit = mean_rate
            elif self._follows_time:
                self.fixed *= _FADE
                self.per_unit = max(_median((seconds - self.fixed) / sizes), 0.01 * mean_rate)
            return  # Otherwise keep the last line: a settled size makes all pieces alike.
        self.known = True
        slope = _median(longer[telling] / apart[telling])
        # A device that is far from full takes the same time for more work; then the slope is 0, or below by chance.
        self.per_unit = max(slope, 0.01 * mean_rate)
        self.fixed = max(0.0, _median(seconds - self.per_unit * sizes))
        self.noise = _median(np.abs(seconds - self.seconds(sizes)))
