"""The examples that wait for a batch, the most costly first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Backlog", "QueuedExamples"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class QueuedExamples:
    """Examples as columns of numbers: the submission of each, its place there, its cost, weight and arrival."""

    owners: Integers
    places: Integers
    costs: Floats
    weights: Floats
    since: Floats

    @classmethod
    def new(cls, costs: npt.NDArray[Any], weights: npt.NDArray[Any] | None, now: float) -> QueuedExamples:
        """Return all examples of a new submission, which has no number yet."""
        count = len(costs)
        return cls(
            np.zeros(count, np.int64),
            np.arange(count, dtype=np.int64),
            np.maximum(np.asarray(costs, np.float64), 0.0),
            np.zeros(count) if weights is None else weights,
            np.full(count, now),
        )

    def only(self, chosen: npt.NDArray[Any]) -> QueuedExamples:
        """Return the chosen examples."""
        return QueuedExamples(
            self.owners[chosen], self.places[chosen], self.costs[chosen], self.weights[chosen], self.since[chosen]
        )


class Backlog:
    """The waiting examples of one lane, sorted by falling cost.

    It consists of columns of numbers, without an object per example: an accelerator takes tens of thousands a second.
    """

    def __init__(self) -> None:
        self._clear()

    def __len__(self) -> int:
        return len(self.costs)

    def oldest(self) -> float:
        """Return when the example that has waited longest arrived."""
        if self._oldest is None:
            self._oldest = float(self.since.min())
        return self._oldest

    def add(self, owner: int, costs: npt.NDArray[Any], weights: npt.NDArray[Any] | None, now: float) -> None:
        """Add all examples of a new submission, which has the number ``owner``."""
        self.put(owner, QueuedExamples.new(costs, weights, now))

    def put(self, owner: int, new: QueuedExamples) -> None:
        """Add examples of the submission with the number ``owner``."""
        self.costs = np.concatenate([self.costs, new.costs])
        self.weights = np.concatenate([self.weights, new.weights])
        self.owners = np.concatenate([self.owners, np.full(len(new.costs), owner, np.int64)])
        self.places = np.concatenate([self.places, new.places])
        self.since = np.concatenate([self.since, new.since])
        self._keep(np.argsort(-self.costs, kind="stable"))  # Stable: equal costs stay in order of arrival.

    def take(self, start: int, count: int) -> QueuedExamples:
        """Remove a range of the sorted examples and return it."""
        end = start + count
        taken = QueuedExamples(
            self.owners[start:end],
            self.places[start:end],
            self.costs[start:end],
            self.weights[start:end],
            self.since[start:end],
        )
        rest = np.ones(len(self), bool)
        rest[start:end] = False
        self._keep(rest)
        return taken

    def drop(self, owners: set[int]) -> None:
        """Remove the examples of these submissions."""
        self._keep(~np.isin(self.owners, list(owners)))

    def _keep(self, chosen: npt.NDArray[Any]) -> None:
        self.costs = self.costs[chosen]
        self.weights = self.weights[chosen]
        self.owners = self.owners[chosen]
        self.places = self.places[chosen]
        self.since = self.since[chosen]
        self._oldest = None

    def _clear(self) -> None:
        self.costs: Floats = np.empty(0)
        self.weights: Floats = np.empty(0)
        self.since: Floats = np.empty(0)
        self._oldest: float | None = None
        self.owners: Integers = np.empty(0, np.int64)
        self.places: Integers = np.empty(0, np.int64)
