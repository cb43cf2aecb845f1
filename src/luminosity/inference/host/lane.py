"""One use of a model in the host: the examples that wait for it, and how they are batched."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.inference.batching.backlog import Backlog, QueuedExamples
from luminosity.inference.batching.policy import BatchPolicy, Cut
from luminosity.inference.handler import Handler, limits_of
from luminosity.inference.host.model import Clock, Family, Model
from luminosity.inference.host.work import Batch, Submission

__all__ = ["Lane", "LaneSettings"]

_LEAST_QUEUE = 2048
_MOST_QUEUE = 65_536
_BATCHES_QUEUED = 16
_QUEUE_BYTES = 256_000_000


@dataclass(frozen=True)
class LaneSettings:
    """What a transform asks of the host for its model."""

    model: Hashable = None
    """Lanes that name the same one share its copies; None: it is this lane's own."""
    family: Family | None = None
    """Of which of its kin only some may be there at once."""
    label: str = ""
    """What messages call the model."""
    inference_args: dict[str, Any] | None = None
    isolate_failures: bool = False
    """Whether to find the examples at fault when a batch fails."""
    timeout: float | None = None
    """Seconds for one batch, with the load of the model where that is still to do."""
    clock: Clock = time


class Lane:
    """Guarded by the host's lock, but for the model itself."""

    def __init__(self, key: Hashable, handler: Handler[Any, Any, Any], model: Model, settings: LaneSettings) -> None:
        self.key = key
        self.handler = handler
        self.settings = settings
        self.model = model
        self.policy = BatchPolicy(limits_of(handler))
        self.pool = Backlog()
        self.retries: deque[Batch] = deque()
        self.users = 0
        self.unused_since = 0.0
        self.producing = 0
        """Sessions that may hand over more before they wait."""
        self._submissions: dict[int, Submission] = {}
        self._last_number = 0
        self._queued_bytes = 0
        self._largest_batch = 0

    def add(self, submission: Submission, costs: Any, weights: Any, now: float) -> None:
        self.receive(submission, QueuedExamples.new(costs, weights, now))

    def has_work(self) -> bool:
        # Asked of every lane, again and again.
        return self.pool.costs.size > 0 or (bool(self.retries) and any(batch.is_wanted() for batch in self.retries))

    def waiting_since(self) -> float:
        """When the oldest of its examples came; those that are tried again are older than any other."""
        return self.pool.oldest() if len(self.pool) and not self.retries else 0.0

    def has_room(self) -> bool:
        if not len(self.pool):
            return True
        most = min(max(_LEAST_QUEUE, _BATCHES_QUEUED * self._largest_batch), _MOST_QUEUE)
        most = max(most, 2 * self.policy.limits.min_count)
        return len(self.pool) < most and self._queued_bytes < _QUEUE_BYTES

    def next(self, now: float, idle: bool) -> Batch | float | None:
        """The next batch, or the seconds until there may be one; None: not before something changes."""
        while self.retries:
            batch = self.retries.popleft()
            if batch.is_wanted():
                return batch
        awaited = any(each.session.waiting for each in self._submissions.values())
        decision = self.policy.next(self.pool, now, self.producing > 0, awaited, idle)
        return self._batch(decision, now) if isinstance(decision, Cut) else decision

    def move_to(self, other: Lane) -> None:
        """All that waits for its first try; the sessions it belongs to need not know."""
        moved = self.pool.take(0, len(self.pool))
        for owner in np.unique(moved.owners).tolist():
            submission = self._submissions.pop(owner)
            self._queued_bytes -= submission.size
            other.receive(submission, moved.only(moved.owners == owner))
            submission.session.moved(self, other)

    def receive(self, submission: Submission, moved: QueuedExamples) -> None:
        self._last_number += 1
        self._submissions[self._last_number] = submission
        self._queued_bytes += submission.size
        self.pool.put(self._last_number, moved)

    def take_all(self, now: float) -> list[Batch]:
        """Everything that waits, however much that is."""
        batches = list(self.retries)
        self.retries.clear()
        if len(self.pool):
            batches.append(self._batch(Cut(0, len(self.pool), 0.0), now))
        return batches

    def drop(self, session: object) -> None:
        """Forget what this session handed over and the device has not yet begun."""
        owners = {number for number, each in self._submissions.items() if each.session is session}
        if owners:
            self.pool.drop(owners)
            for number in owners:
                self._queued_bytes -= self._submissions.pop(number).size

    def check_integrity(self) -> None:
        left = sum(submission.left for submission in self._submissions.values())
        assert min(self.users, self.producing) >= 0, f"{self.key}: negative counts"
        assert left == len(self.pool), f"{self.key}: {len(self.pool)} examples wait, {left} were handed over"
        queued = sum(submission.size for submission in self._submissions.values())
        assert queued == self._queued_bytes, f"{self.key}: {self._queued_bytes} bytes wait, {queued} were handed over"

    def _batch(self, cut: Cut, now: float) -> Batch:
        taken = self.pool.take(cut.start, cut.count)
        self._largest_batch = max(self._largest_batch, cut.count)
        parts: list[tuple[Submission, Any]] = []
        for owner in np.unique(taken.owners).tolist():
            submission = self._submissions[owner]
            places = taken.places[taken.owners == owner]
            submission.left -= len(places)
            parts.append((submission, places))
            if not submission.left:
                del self._submissions[owner]
                self._queued_bytes -= submission.size
        waited = float((now - taken.since).sum())
        return Batch(self, parts, float(taken.costs[0]), float(taken.costs.sum()), cut.budget, waited)
