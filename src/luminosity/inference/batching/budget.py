"""The batch budget: how much one batch may cost, found by trying."""

from __future__ import annotations

import math

from luminosity._shared.cost_line import CostLine
from luminosity.inference.batching.limits import Limits

__all__ = ["Budget"]

_FIRST_EXAMPLES = 16  # few enough to fit into any memory
_GROWTH = 2.0  # a larger factor would overshoot the memory, a smaller one needs more batches


class Budget:
    """The largest padded cost of a batch.

    It starts at a few examples and doubles until the fixed part of a batch's time is a small share of it. Running out
    of memory halves it, and it never grows back to what failed.
    """

    def __init__(self, limits: Limits, timing: CostLine) -> None:
        self._limits = limits
        self._timing = timing
        self._ceiling = math.inf
        self._found = 0.0
        self._fitted = 0.0

    @property
    def settled(self) -> bool:
        """Whether the budget has stopped growing."""
        return self._found >= min(self._wanted(), self._ceiling)

    def limit(self, longest: float) -> float:
        """Return the budget of a batch whose most costly example costs ``longest``; one example always fits."""
        if not self._found:
            self._found = _FIRST_EXAMPLES * longest
        limit = min(max(self._found, self._limits.min_count * longest), self._ceiling)
        if self._limits.max_seconds is not None and self._timing.known:
            limit = min(limit, (self._limits.max_seconds - self._timing.fixed) / self._timing.per_unit)
        return max(limit, longest)

    def succeeded(self, cost: float, seconds: float) -> None:
        """Learn from a batch of this padded cost that took this long."""
        self._timing.observe(cost, seconds)
        self._fitted = max(self._fitted, cost)
        if cost > self._found / _GROWTH:
            self._found = max(self._found, min(_GROWTH * self._found, self._wanted(), self._ceiling))

    def out_of_memory(self, cost: float, count: int) -> None:
        """Learn from a batch of this padded cost and number of examples that did not fit into the memory."""
        if count == 1 and cost < self._fitted:
            # The example itself is at fault, not the size of its batches.
            self._ceiling = max(self._ceiling, self._fitted)
            return
        self._ceiling = min(self._ceiling, cost / 2)
        self._found = min(self._found, self._ceiling)

    def _wanted(self) -> float:
        if not self._timing.known:
            return math.inf  # Only batches of different sizes show the fixed part.
        share = self._limits.overhead_share
        return self._timing.overhead * (1 - share) / share
