"""A lane queues the blocks that sessions submit to one model version, and cuts batches; and the order of lanes."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np

from luminosity.inference.batching import Arrivals, Backlog, BatchPolicy, Cut, QueuedExamples
from luminosity.inference.blocks import Block, Indices, join, part_of, piece, take
from luminosity.inference.handler import Handler, limits_of
from luminosity.inference.host.interface import BatchStats, LaneSettings, Outcome
from luminosity.inference.host.model import Model

__all__ = ["Batch", "Lane", "LaneQueue", "Stage", "Submission", "Submitter"]

_LEAST_QUEUE = 2048  # examples; enough to cut the first batches by cost
_MOST_QUEUE = 65_536  # examples; more would not make batches better
_BATCHES_QUEUED = 16  # enough to find examples of similar cost for each batch
_QUEUE_BYTES = 256_000_000  # a lane that holds more takes no new blocks
_LOOK_WHEN_IDLE = 16  # lanes that wait for more examples; an idle device may take one of them earlier


class Submitter(Protocol):
    """The session that submitted a block, as lanes and batches see it. The host's lock protects every member."""

    step: Any
    """The Beam step that the model's own metrics and logs belong to."""
    closed: bool
    waiting: bool
    """Whether the session's thread is blocked until the host makes progress."""

    def deliver(self, outcome: Outcome) -> None:
        """Hand an outcome to the session."""

    def count(self, lane: Lane, stats: BatchStats) -> None:
        """Record the statistics of one batch."""

    def moved(self, old: Lane, new: Lane) -> None:
        """Note that examples of this session moved from one lane to another."""


@dataclass(eq=False)
class Submission:
    """A block that a session submitted; its examples may go to different batches."""

    session: Submitter
    prepared: Block
    tag: Any
    """Any value; the submitter gets it back with the outcomes."""
    left: int
    """How many examples are still in the lane."""
    size: int
    """Bytes of the block."""


class Stage(Enum):
    """The kind of device thread that a batch occupies."""

    WAITING = auto()
    COMPUTING = auto()
    RETURNING = auto()


@dataclass(eq=False)
class Batch:
    """Examples that the model computes in one call, grouped by submission."""

    lane: Lane
    parts: list[tuple[Submission, Indices]]
    longest: float
    useful: float
    budget: float
    waited: float
    is_padded: bool = True
    """Whether each example costs as much as the most costly one."""
    inputs: Any = None
    due_from: float | None = None
    """When its timeout began to run; None before the computation starts."""
    begun: float = 0.0
    """When the batch was cut."""
    started: float = 0.0
    """When the computation started; 0 if it never did."""
    started_ns: int = 0
    stage: Stage = Stage.WAITING
    abandoned: bool = False
    """Whether the batch exceeded its timeout; its examples have failed, and its thread's result is ignored."""
    attempt: int = 0
    """The number of the load whose model computes the batch."""
    future: Future[Any] | None = None
    """The answer of a model that takes examples as they come; None before it has the example, and for others."""
    errors: Mapping[int, Exception] = field(default_factory=dict[int, Exception])
    """The errors of examples that have failed by themselves, by their places in the batch."""
    stats: BatchStats = field(init=False)

    def __post_init__(self) -> None:
        self.stats = BatchStats(self.count, self.useful, self.padded, self.budget, self.waited)

    @property
    def count(self) -> int:
        """The number of examples."""
        return sum(len(places) for _, places in self.parts)

    @property
    def padded(self) -> float:
        """The cost of the batch when every example is padded to the longest one, if the model pads."""
        return self.longest * self.count if self.is_padded else self.useful

    def is_wanted(self) -> bool:
        """Return whether a session still waits for any of the examples."""
        return any(not submission.session.closed for submission, _ in self.parts)

    def counting_session(self) -> Submitter:
        """Return the session that records this batch: the first one that is still open."""
        sessions = [submission.session for submission, _ in self.parts]
        return next((each for each in sessions if not each.closed), sessions[0])

    def prepared(self) -> Block:
        """Return all examples as one block."""
        part = take if self.is_padded else part_of  # a handler that does not pad knows slices, and changes none
        return join([part(submission.prepared, places) for submission, places in self.parts])

    def outcomes(self, values: Block, model_id: str | None) -> list[tuple[Submitter, Outcome]]:
        """Return an outcome per submission, and one per example that has failed, with the sessions that get them."""
        outcomes: list[tuple[Submitter, Outcome]] = []
        done = 0
        for submission, places in self.parts:
            part = piece(values, done, done + len(places))
            failed = [place for place in range(len(places)) if done + place in self.errors] if self.errors else []
            for place in failed:
                error = self.errors[done + place]
                alone = Outcome(submission.tag, places[place : place + 1], None, error, None, batch_count=1)
                outcomes.append((submission.session, alone))
            done += len(places)
            good, part = _without(places, part, failed)
            if len(good):
                outcomes.append((submission.session, Outcome(submission.tag, good, part, None, model_id)))
        return outcomes

    def failures(self, error: BaseException, batch_count: int) -> list[tuple[Submitter, Outcome]]:
        """Return one failed outcome per submission, with the session that gets it."""
        return [
            (submission.session, Outcome(submission.tag, places, None, error, None, batch_count))
            for submission, places in self.parts
        ]

    def again(self) -> Batch:
        """Return a new batch of the same examples: a thread may still hold this one."""
        return Batch(self.lane, self.parts, self.longest, self.useful, self.budget, self.waited, self.is_padded)

    def halves(self) -> list[Batch]:
        """Return the same examples as two batches. Costs are halved, not looked up: they are only estimates."""
        middle = self.count // 2
        first: list[tuple[Submission, Indices]] = []
        second: list[tuple[Submission, Indices]] = []
        seen = 0
        for submission, places in self.parts:
            here = int(np.clip(middle - seen, 0, len(places)))
            seen += len(places)
            first += [(submission, places[:here])] if here else []
            second += [(submission, places[here:])] if here < len(places) else []
        return [
            Batch(self.lane, parts, self.longest, self.useful / 2, self.budget, 0.0, self.is_padded)
            for parts in (first, second)
        ]


def _without(places: Indices, values: Block, failed: list[int]) -> tuple[Indices, Block]:
    """Return the places and the values of the examples that have not failed."""
    if not failed:
        return places, values
    good = np.delete(np.arange(len(places)), failed)
    return places[good], take(values, good)


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
        self.backlog: Backlog | Arrivals = Backlog()
        self.is_padded: bool | None = None
        """Whether the model pads examples; None before it is loaded."""
        self.submits = False
        """Whether the model takes examples as they come; known once it is loaded."""
        self.submitted: set[Batch] = set()
        """The examples that such a model has."""
        self.retries: deque[Batch] = deque()
        self.users = 0
        self.unused_since = 0.0
        self.producing = 0
        """Sessions that may submit more examples before they wait for outcomes."""
        self.changed = changed
        self._submissions: dict[int, Submission] = {}
        self._last_number = 0
        self._queued_bytes = 0
        self._largest_batch = 0

    def has_work(self) -> bool:
        """Return whether any example waits. Called often, for every lane."""
        return len(self.backlog) > 0 or (bool(self.retries) and any(batch.is_wanted() for batch in self.retries))

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
        """Return the next batch, or the seconds until there may be one, or None if that needs a change.

        The model is loaded.
        """
        if self.is_padded is None:
            has_own_lengths = self.policy.limits.length is not None  # the author's, perhaps with boundaries
            # Models that pack rows pad them if they get arguments.
            args = self.settings.inference_args
            self.submits = self.model.is_continuous and self.handler.submits(args)
            self.is_padded = not self.submits and (has_own_lengths or bool(args) or not self.handler.sums_costs)
            if isinstance(self.backlog, Backlog) and not self.is_padded:
                self.backlog = self.backlog.in_order_of_arrival()
        if self.submits and self.model.users >= self.model.capacity:
            return None  # the device looks here again when an example is answered
        while self.retries:
            batch = self.retries.popleft()
            if batch.is_wanted():
                return batch
        if self.submits:
            return self._batch(Cut(0, 1, float(self.backlog.costs[0])), now) if len(self.backlog) else None
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
        self.changed(self)

    def retry(self, batches: list[Batch]) -> None:
        """Queue batches that were tried before, ahead of everything else."""
        self.retries.extendleft(reversed(batches))
        self.changed(self)

    def end_producing(self) -> None:
        """Note that a session waits or ends, so that the lane need not wait for its examples."""
        self.producing -= 1
        self.changed(self)

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
        for batch in list(self.submitted):
            if batch.future is not None and not batch.is_wanted():
                batch.future.cancel()

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
        longest, useful = float(taken.costs.max()), float(taken.costs.sum())
        return Batch(self, parts, longest, useful, cut.budget, waited, self.is_padded is not False)


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
