"""The objects that move through a model host: submissions in, batches across the device, outcomes out.

The host's own threads work for a step of Beam: ``as_part_of`` lets Beam count their metrics and logs for that step.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from apache_beam.runners.worker import statesampler

from luminosity.inference.blocks import Block, Indices, concat, piece, take

if TYPE_CHECKING:
    from luminosity.inference.host.lane import Lane

__all__ = ["Batch", "BatchStats", "Outcome", "Stage", "Submission", "Submitter", "as_part_of", "current_step"]


class Submitter(Protocol):
    """The session that submitted a block, as lanes and batches see it. The host's lock protects every member."""

    step: Any
    """The Beam step that the model's own metrics and logs belong to."""
    closed: bool
    waiting: bool
    """Whether the session's thread is blocked until the host makes progress."""

    def deliver(self, outcome: Outcome) -> None:
        """Hand an outcome to the session."""
        ...

    def count(self, lane: Lane, stats: BatchStats) -> None:
        """Record the statistics of one batch."""
        ...

    def moved(self, old: Lane, new: Lane) -> None:
        """Note that examples of this session moved from one lane to another."""
        ...


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


@dataclass(frozen=True)
class Outcome:
    """The result of some examples of a submission: one value each, or one failure for all of them."""

    tag: Any
    places: Indices
    """The places of the examples in their submission."""
    values: Block | None
    error: BaseException | None
    model_id: str | None
    batch_count: int = 0
    """How many examples may have caused the failure; 0 if the model itself is at fault."""


@dataclass
class BatchStats:
    """Measurements of one call of the model, for counters. Times are in seconds."""

    count: int
    useful: float
    padded: float
    budget: float
    waited: float
    num_bytes: int = 0
    failed: bool = False
    out_of_memory: bool = False
    collate: float = 0.0
    transfer: float = 0.0
    compute: float = 0.0
    collect: float = 0.0
    busy: float = 0.0
    latency_micro_secs: int = 0
    notes: dict[str, int] = field(default_factory=dict[str, int])
    """What the handler has counted, by the names of ``InferenceMetrics``."""


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
    stats: BatchStats = field(init=False)

    def __post_init__(self) -> None:
        self.stats = BatchStats(self.count, self.useful, self.padded, self.budget, self.waited)

    @property
    def count(self) -> int:
        """The number of examples."""
        return sum(len(places) for _, places in self.parts)

    @property
    def padded(self) -> float:
        """The cost of the batch when every example is padded to the longest one."""
        return self.longest * self.count

    def is_wanted(self) -> bool:
        """Return whether a session still waits for any of the examples."""
        return any(not submission.session.closed for submission, _ in self.parts)

    def counting_session(self) -> Submitter:
        """Return the session that records this batch: the first one that is still open."""
        sessions = [submission.session for submission, _ in self.parts]
        return next((each for each in sessions if not each.closed), sessions[0])

    def prepared(self) -> Block:
        """Return all examples as one block."""
        return concat([take(submission.prepared, places) for submission, places in self.parts])

    def outcomes(self, values: Block, model_id: str | None) -> list[tuple[Submitter, Outcome]]:
        """Return one successful outcome per submission, with the session that gets it."""
        outcomes: list[tuple[Submitter, Outcome]] = []
        done = 0
        for submission, places in self.parts:
            part = piece(values, done, done + len(places))
            done += len(places)
            outcomes.append((submission.session, Outcome(submission.tag, places, part, None, model_id)))
        return outcomes

    def failures(self, error: BaseException, batch_count: int) -> list[tuple[Submitter, Outcome]]:
        """Return one failed outcome per submission, with the session that gets it."""
        return [
            (submission.session, Outcome(submission.tag, places, None, error, None, batch_count))
            for submission, places in self.parts
        ]

    def again(self) -> Batch:
        """Return a new batch of the same examples: a thread may still hold this one."""
        return Batch(self.lane, self.parts, self.longest, self.useful, self.budget, self.waited)

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
        return [Batch(self.lane, parts, self.longest, self.useful / 2, self.budget, 0.0) for parts in (first, second)]


def current_step() -> Any:
    """Return the step that this thread runs, as Beam knows it, or None outside a bundle."""
    tracker = statesampler.get_current_tracker()
    return None if tracker is None else tracker.current_state()


class _OneStep:
    """Replaces Beam's state tracker in a thread that belongs to no bundle: it knows one step."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def current_state(self) -> Any:
        return self._step

    def update_metric(self, name: Any, value: Any) -> None:
        if self._step.metrics_container is not None:
            self._step.metrics_container.get_metric_cell(name).update(value)


@contextmanager
def as_part_of(step: Any) -> Generator[None]:
    """Count what this thread counts and logs for that step; Beam finds the step by the thread."""
    if step is None:
        yield
        return
    statesampler.set_current_tracker(_OneStep(step))
    try:
        yield
    finally:
        statesampler.set_current_tracker(None)
