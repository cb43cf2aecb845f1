"""A lane: the queue of examples for one model version at a host; and the order in which lanes get a batch."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.inference.batching.backlog import Backlog, QueuedExamples
from luminosity.inference.batching.policy import BatchPolicy, Cut
from luminosity.inference.handler import Handler, limits_of
from luminosity.inference.host.model import Clock, Family, Model
from luminosity.inference.host.work import Batch, Submission

__all__ = ["Lane", "LaneQueue", "LaneSettings"]
_LEAST_QUEUE = 2048  # examples; enough to cut the first batches by cost
_MOST_QUEUE = 65_536  # examples; more would not make batches better
_BATCHES_QUEUED = 16  # enough to find examples of similar cost for each batch
_QUEUE_BYTES = 256_000_000  # a lane that holds more takes no new blocks


@dataclass(frozen=True)
class LaneSettings:
    """How a transform wants its model to be run."""

    model: Hashable = None
    """Lanes that name the same model share its copies; None: the model belongs to this lane."""
    family: Family | None = None
    """Limits how many related models are in memory at once."""
    label: str = ""
    """The model's name in messages."""
    inference_args: dict[str, Any] | None = None
    isolate_failures: bool = False
    """Whether to find the examples at fault when a batch fails, by halving it."""
    timeout: float | None = None
    """Seconds for one batch, including the load of the model if it is not yet in memory."""
    clock: Clock = time
    longest_wait: float = math.inf
    """Seconds that examples wait for a full batch, unless the handler's author says it."""


class Lane:
    """Queues the examples that wait for one model version, and cuts batches.

    The host's lock protects it: the caller holds the lock in every method.
    """

    def __init__(
        self,
        key: Hashable,
        handler: Handler[Any, Any, Any],
        model: Model,
        settings: LaneSettings,
        changed: Callable[[Lane], None],
    ) -> None:
        """``changed`` is called when the lane may have a batch that it did not have before."""
        self.key = key
        self.handler = handler
        self.settings = settings
        self.model = model
        self.policy = BatchPolicy(limits_of(handler), settings.longest_wait)
        self.backlog = Backlog()
        self.retries: deque[Batch] = deque()
        self.users = 0
        self.unused_since = 0.0
        self.producing = 0
        """Sessions that may submit more examples before they wait for outcomes."""
        self._changed = changed
        self._submissions: dict[int, Submission] = {}
        self._last_number = 0
        self._queued_bytes = 0
        self._largest_batch = 0

    def add(self, submission: Submission, costs: Any, weights: Any, now: float) -> None:
        """Queue all examples of a new submission."""
        self.receive(submission, QueuedExamples.new(costs, weights, now))

    def has_work(self) -> bool:
        """Return whether any example waits. Called often, for every lane."""
        return self.backlog.costs.size > 0 or (bool(self.retries) and any(batch.is_wanted() for batch in self.retries))

    def waiting_since(self) -> float:
        """Return when the oldest example arrived; retried examples count as older than all others."""
        return self.backlog.oldest() if len(self.backlog) and not self.retries else 0.0

    def has_room(self) -> bool:
        """Return whether the lane takes another block."""
        if not len(self.backlog):
            return True
        most = min(max(_LEAST_QUEUE, _BATCHES_QUEUED * self._largest_batch), _MOST_QUEUE)
        most = max(most, 2 * self.policy.limits.min_count)
        return len(self.backlog) < most and self._queued_bytes < _QUEUE_BYTES

    def next(self, now: float, idle: bool) -> Batch | float | None:
        """Return the next batch, or the seconds until there may be one, or None if that needs a change."""
        while self.retries:
            batch = self.retries.popleft()
            if batch.is_wanted():
                return batch
        awaited = any(each.session.waiting for each in self._submissions.values())
        decision = self.policy.next(self.backlog, now, self.producing > 0, awaited, idle)
        return self._batch(decision, now) if isinstance(decision, Cut) else decision

    def move_to(self, other: Lane) -> None:
        """Move all examples that were not yet tried to another lane."""
        moved = self.backlog.take(0, len(self.backlog))
        for owner in np.unique(moved.owners).tolist():
            submission = self._submissions.pop(owner)
            self._queued_bytes -= submission.size
            other.receive(submission, moved.only(moved.owners == owner))
            submission.session.moved(self, other)

    def receive(self, submission: Submission, moved: QueuedExamples) -> None:
        """Queue some examples of a submission."""
        self._last_number += 1
        self._submissions[self._last_number] = submission
        self._queued_bytes += submission.size
        self.backlog.put(self._last_number, moved)
        self._changed(self)

    def retry(self, batches: list[Batch]) -> None:
        """Queue batches that were tried before, ahead of everything else."""
        self.retries.extendleft(reversed(batches))
        self._changed(self)

    def begin_producing(self) -> None:
        """Note that one more session may submit examples before it waits for outcomes."""
        self.producing += 1

    def end_producing(self) -> None:
        """Note that a session waits or ends, so that the lane need not wait for its examples."""
        self.producing -= 1
        self._changed(self)

    def note_waiting_session(self) -> None:
        """Note that a session waits for outcomes: a batch that is smaller than the author wants must go then."""
        self._changed(self)

    def take_all(self, now: float) -> list[Batch]:
        """Take everything that waits, as batches of any size."""
        batches = list(self.retries)
        self.retries.clear()
        if len(self.backlog):
            batches.append(self._batch(Cut(0, len(self.backlog), 0.0), now))
        return batches

    def drop(self, session: object) -> None:
        """Discard the session's examples that are not yet cut into batches."""
        owners = {number for number, each in self._submissions.items() if each.session is session}
        if owners:
            self.backlog.drop(owners)
            for number in owners:
                self._queued_bytes -= self._submissions.pop(number).size

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the books are inconsistent."""
        left = sum(submission.left for submission in self._submissions.values())
        assert min(self.users, self.producing) >= 0, f"{self.key}: negative counts"
        assert left == len(self.backlog), f"{self.key}: {len(self.backlog)} examples wait, {left} were submitted"
        queued = sum(submission.size for submission in self._submissions.values())
        assert queued == self._queued_bytes, f"{self.key}: {self._queued_bytes} bytes wait, {queued} were submitted"

    def _batch(self, cut: Cut, now: float) -> Batch:
        taken = self.backlog.take(cut.start, cut.count)
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


_LOOK_WHEN_IDLE = 16  # lanes that wait for more examples; an idle device may take one of them earlier


class LaneQueue:
    """The lanes that may have a batch, in the order in which they get one.

    A host may have thousands of lanes, one for each key. So a lane is looked at only after a change: it has new
    examples, its model has arrived, or a session has stopped to submit. A lane that waits for more examples is looked
    at again when its wait is over.

    The caller holds the host's lock in every method.
    """

    def __init__(self) -> None:
        self._changed: OrderedDict[Lane, None] = OrderedDict()
        self._lingering: list[tuple[float, int, Lane]] = []
        """A heap of the lanes that wait for more examples, by the end of their wait; some entries are out of date."""
        self._ends: dict[Lane, float] = {}
        """The end of the wait of each lane that waits."""
        self._numbers = itertools.count()

    def add(self, lane: Lane) -> None:
        """Look at a lane again, after the lanes that are already here."""
        self._changed.setdefault(lane)

    def next(self, now: float, is_idle: bool) -> Batch | float:
        """Return the next batch, or the seconds until there may be one; infinite if that needs a change.

        ``is_idle``: whether the device has nothing to do.
        """
        while self._changed:
            lane, _ = self._changed.popitem(last=False)
            batch = self._look_at(lane, now, is_idle)
            if batch is not None:
                return batch
        looked = self._due(now, _LOOK_WHEN_IDLE if is_idle else 0)
        for lane in looked:
            batch = self._look_at(lane, now, is_idle)
            if batch is not None:
                for other in looked[looked.index(lane) + 1 :]:
                    self.add(other)
                return batch
        self._skip_outdated()
        return self._lingering[0][0] - now if self._lingering else math.inf

    def _look_at(self, lane: Lane, now: float, is_idle: bool) -> Batch | None:
        self._ends.pop(lane, None)
        if not lane.model.is_ready or lane.model.is_leaving or not lane.has_work():
            return None  # The host adds the lane again when this changes.
        found = lane.next(now, is_idle)
        if isinstance(found, Batch):
            self.add(lane)  # Next time the other lanes come first.
            return found
        if found is not None:
            self._ends[lane] = now + found
            heapq.heappush(self._lingering, (now + found, next(self._numbers), lane))
        return None

    def _due(self, now: float, at_least: int) -> list[Lane]:
        """Remove and return the lanes whose wait is over, and further ones up to this number."""
        due: list[Lane] = []
        self._skip_outdated()
        while self._lingering and (self._lingering[0][0] <= now or len(due) < at_least):
            lane = heapq.heappop(self._lingering)[2]
            del self._ends[lane]
            due.append(lane)
            self._skip_outdated()
        return due

    def _skip_outdated(self) -> None:
        """Remove entries of lanes that were looked at since."""
        while self._lingering and self._ends.get(self._lingering[0][2]) != self._lingering[0][0]:
            heapq.heappop(self._lingering)
