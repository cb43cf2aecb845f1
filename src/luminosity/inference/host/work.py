"""What travels through the host: submissions in, batches across the device, outcomes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np

from luminosity.inference.blocks import Block, Indices, concat, take

if TYPE_CHECKING:
    from luminosity.inference.host.lane import Lane
    from luminosity.inference.host.session import Session

__all__ = ["Batch", "BatchStats", "Outcome", "Stage", "Submission"]


@dataclass(eq=False)
class Submission:
    """A block that a session handed over; its examples may go to different batches."""

    session: Session
    prepared: Block
    tag: Any
    """Whatever the submitter wants back with the outcomes."""
    left: int
    size: int


@dataclass(frozen=True)
class Outcome:
    """What became of some examples of a submission: a value each, or one failure."""

    tag: Any
    places: Indices
    values: Block | None
    error: BaseException | None
    model_id: str | None
    batch_count: int = 0
    """Of a failure: to how many examples it may be due; none where it is the model's own."""


@dataclass
class BatchStats:
    """What one call of the model was, for counters. Times in seconds."""

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


class Stage(Enum):
    """Which thread a batch occupies."""

    WAITING = auto()
    COMPUTING = auto()
    RETURNING = auto()


@dataclass(eq=False)
class Batch:
    """Examples that go to the device together, by submission."""

    lane: Lane
    parts: list[tuple[Submission, Indices]]
    longest: float
    useful: float
    budget: float
    waited: float
    inputs: Any = None
    due_from: float | None = None
    """Since when its timeout runs: before its model is loaded."""
    begun: float = 0.0
    """When it was cut."""
    started: float = 0.0
    """When its computation was; none: it has failed before."""
    started_ns: int = 0
    stage: Stage = Stage.WAITING
    abandoned: bool = False
    stats: BatchStats = field(init=False)

    def __post_init__(self) -> None:
        self.stats = BatchStats(self.count, self.useful, self.padded, self.budget, self.waited)

    @property
    def count(self) -> int:
        return sum(len(places) for _, places in self.parts)

    @property
    def padded(self) -> float:
        return self.longest * self.count

    def is_wanted(self) -> bool:
        """Whether anyone is left who waits for it."""
        return any(not submission.session.closed for submission, _ in self.parts)

    def prepared(self) -> Block:
        return concat([take(submission.prepared, places) for submission, places in self.parts])

    def halves(self) -> list[Batch]:
        """The same examples as two batches. Costs are halved, not looked up: they only steer."""
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
