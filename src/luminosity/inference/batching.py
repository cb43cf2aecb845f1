"""The examples that wait for a batch: when one is cut, which examples it holds, and how much it may cost."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from luminosity._shared.cost_line import CostLine
from luminosity.inference.handler import Limits

__all__ = ["Arrivals", "Backlog", "BatchPolicy", "Budget", "Cut", "QueuedExamples", "first_cut"]

Numbers: TypeAlias = npt.NDArray[Any]


class QueuedExamples(NamedTuple):
    """Examples as columns of numbers: the submission of each, its place there, its cost, weight and arrival."""

    owners: Numbers
    places: Numbers
    costs: Numbers
    weights: Numbers
    since: Numbers

    @classmethod
    def new(cls, costs: Numbers, weights: Numbers | None, now: float) -> QueuedExamples:
        """Return all examples of a new submission, which has no number yet."""
        count = len(costs)
        costs = np.maximum(np.asarray(costs, np.float64), 0.0)
        weights = np.zeros(count) if weights is None else weights
        return cls(np.zeros(count, np.int64), np.arange(count, dtype=np.int64), costs, weights, np.full(count, now))

    def only(self, chosen: Numbers | slice) -> QueuedExamples:
        """Return the chosen examples."""
        return QueuedExamples(*(column[chosen] for column in self))


class Backlog:
    """The waiting examples of one lane, sorted by falling cost.

    It consists of columns of numbers, without an object per example: an accelerator takes tens of thousands a second.
    """

    def __init__(self) -> None:
        self._keep(QueuedExamples.new(np.empty(0), None, 0.0))

    def __len__(self) -> int:
        return len(self.costs)

    @property
    def total(self) -> float:
        """The cost of all examples together."""
        return float(self.costs.sum())

    @property
    def total_weight(self) -> float:
        """The weight of all examples together."""
        return float(self.weights.sum())

    def oldest(self) -> float:
        """Return when the example that has waited longest arrived."""
        if self._oldest is None:
            self._oldest = float(self.since.min())
        return self._oldest

    def place_of_oldest(self) -> int:
        """Return the place of the example that has waited longest."""
        return int(np.argmin(self.since))

    def put(self, owner: int, new: QueuedExamples) -> None:
        """Add examples of the submission with the number ``owner``."""
        owned = new._replace(owners=np.full(len(new.costs), owner, np.int64))
        joined = QueuedExamples(*map(np.concatenate, zip(self._examples, owned, strict=True)))
        self._keep(joined.only(np.argsort(-joined.costs, kind="stable")))  # Equal costs stay in order of arrival.

    def take(self, start: int, count: int) -> QueuedExamples:
        """Remove a range of the sorted examples and return it."""
        rest = np.ones(len(self), bool)
        rest[start : start + count] = False
        taken = self._examples.only(slice(start, start + count))
        self._keep(self._examples.only(rest))
        return taken

    def drop(self, owners: set[int]) -> None:
        """Remove the examples of these submissions."""
        self._keep(self._examples.only(~np.isin(self._examples.owners, list(owners))))

    def in_order_of_arrival(self) -> Arrivals:
        """Return the same examples as a queue, for a model that does not pad."""
        arrivals = Arrivals()
        order = self._examples.only(np.argsort(self.since, kind="stable"))
        for owner in dict.fromkeys(order.owners.tolist()):
            arrivals.put(owner, order.only(order.owners == owner))
        return arrivals

    def _keep(self, examples: QueuedExamples) -> None:
        self._examples = examples
        self.costs, self.weights, self.since = examples.costs, examples.weights, examples.since
        self._oldest: float | None = None


class Arrivals:
    """The waiting examples of one lane in the order in which they arrived, for a model that does not pad.

    It keeps the columns of each submission as they came: to put them in or to take some takes no time per example.
    """

    def __init__(self) -> None:
        self._waiting: deque[QueuedExamples] = deque()
        self._count = 0
        self.total = 0.0
        self.total_weight = 0.0

    def __len__(self) -> int:
        return self._count

    @property
    def costs(self) -> Numbers:
        """The costs of the examples that came first; of any at all if not empty."""
        return self._waiting[0].costs if self._waiting else np.empty(0)

    def oldest(self) -> float:
        """Return when the example that has waited longest arrived."""
        return float(self._waiting[0].since[0])

    def place_of_oldest(self) -> int:
        """Return the place of the example that has waited longest: the first."""
        return 0

    def put(self, owner: int, new: QueuedExamples) -> None:
        """Add examples of the submission with the number ``owner``."""
        if len(new.costs):
            self._append(new._replace(owners=np.full(len(new.costs), owner, np.int64)))

    def fitting(self, budget: float, max_count: int, max_weight: float) -> int:
        """Return how many examples from the front are within these limits; at least one."""
        found, cost, weight = 0, 0.0, 0.0
        for examples in self._waiting:
            costs, weights = cost + np.cumsum(examples.costs), weight + np.cumsum(examples.weights)
            fit = min(
                int(np.searchsorted(costs, budget, side="right")),
                int(np.searchsorted(weights, max_weight, side="right")),
            )
            found += fit
            if fit < len(costs) or found >= max_count:
                break
            cost, weight = float(costs[-1]), float(weights[-1])
        return max(1, min(found, max_count))

    def take(self, start: int, count: int) -> QueuedExamples:
        """Remove the first ``count`` examples and return them; ``start`` is 0."""
        taken: list[QueuedExamples] = []
        while count and self._waiting:
            examples = self._waiting.popleft()
            if len(examples.costs) > count:
                self._waiting.appendleft(examples.only(slice(count, None)))
                examples = examples.only(slice(count))
            taken.append(examples)
            count -= len(examples.costs)
            self._count -= len(examples.costs)
            self.total -= float(examples.costs.sum())
            self.total_weight -= float(examples.weights.sum())
        if not self._waiting:
            self.total = self.total_weight = 0.0  # no sum of rounding errors
        empty = QueuedExamples.new(np.empty(0), None, 0.0)
        return QueuedExamples(*map(np.concatenate, zip(*taken, strict=True))) if taken else empty

    def drop(self, owners: set[int]) -> None:
        """Remove the examples of these submissions."""
        kept = [examples for examples in self._waiting if int(examples.owners[0]) not in owners]
        self._waiting.clear()
        self._count, self.total, self.total_weight = 0, 0.0, 0.0
        for examples in kept:
            self._append(examples)

    def _append(self, examples: QueuedExamples) -> None:
        self._waiting.append(examples)
        self._count += len(examples.costs)
        self.total += float(examples.costs.sum())
        self.total_weight += float(examples.weights.sum())


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


_SHORTEST_LINGER_S = 0.001  # enough for a session to submit its next block
_LONGEST_LINGER_S = 0.05  # a longer wait would be noticed by a client of a service
_SMALL_BACKLOG = 128  # examples; finding the best partition takes quadratic time


@dataclass(frozen=True)
class Cut:
    """A range of the sorted backlog, and the budget it was cut by."""

    start: int
    count: int
    budget: float


class BatchPolicy:
    """Decides on the next batch; changes nothing itself, and gets the time from its caller."""

    def __init__(self, limits: Limits, longest_wait: float = math.inf) -> None:
        """``longest_wait``: the seconds that examples wait for a full batch, unless ``limits`` say it."""
        self.limits = limits
        self._longest_wait = longest_wait
        self.timing = CostLine()
        self.budget = Budget(limits, self.timing)

    def next(
        self, backlog: Backlog | Arrivals, now: float, more_coming: bool, awaited: bool = False, idle: bool = False
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
        waited = now - backlog.oldest()
        patience = self._patience(backlog, awaited)
        wants_more = len(backlog) < self.limits.min_count and not awaited
        in_no_hurry = self.limits.max_wait is not None or wants_more or not self.timing.known
        left = (_SHORTEST_LINGER_S if idle and not in_no_hurry else patience) - waited
        if more_coming and left > 0 and not self._enough(backlog):
            return left
        # The most costly come first. If the backlog is refilled all the time, the others would wait forever, so an
        # example that has waited too long comes before them.
        return self._cut(backlog, backlog.place_of_oldest() if waited >= patience else 0)

    def _patience(self, backlog: Backlog | Arrivals, awaited: bool) -> float:
        """Return how long an example may wait for others."""
        if self.limits.max_wait is not None:
            return self.limits.max_wait
        if len(backlog) < self.limits.min_count and not awaited:
            return self._longest_wait  # The author wants full batches. They wait until the bundle ends, at most.
        expected = self.timing.seconds(self.budget.limit(float(backlog.costs[0])))
        return min(max(expected, _SHORTEST_LINGER_S), _LONGEST_LINGER_S)

    def _enough(self, backlog: Backlog | Arrivals) -> bool:
        """Return whether the backlog fills a batch."""
        if len(backlog) < self.limits.min_count:
            return False
        full = backlog.total >= self.budget.limit(float(backlog.costs[0]))
        return full or len(backlog) >= self.limits.max_count or backlog.total_weight >= self.limits.max_weight

    def _cut(self, backlog: Backlog | Arrivals, start: int) -> Cut:
        if isinstance(backlog, Arrivals):
            budget = self.budget.limit(float(backlog.costs[0]))
            count = backlog.fitting(budget, self.limits.max_count, self.limits.max_weight)
            return Cut(0, max(count, min(self.limits.min_count, len(backlog))), budget)
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


def first_cut(costs: Numbers, most: int, overhead: float) -> int:
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


def _best_of_all(costs: Numbers, most: int, overhead: float) -> int:
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
