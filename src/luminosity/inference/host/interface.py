"""What steps and a model host know of each other, whether the host is in the same process or in the shared one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from luminosity.inference.blocks import Block, Indices
from luminosity.inference.handler import Handler

__all__ = [
    "Ahead",
    "BatchStats",
    "Clock",
    "Family",
    "Host",
    "HostLane",
    "HostSession",
    "LaneSettings",
    "LoadStats",
    "Outcome",
]


class Clock(Protocol):
    """A source of time for Beam's metrics: the module ``time``, or a test's clock."""

    def time_ns(self) -> int:
        """Return the time in nanoseconds."""
        ...


@dataclass(frozen=True)
class Family:
    """Models of which at most ``most`` may be in memory at once, as ``max_models_per_worker_hint`` says."""

    name: Hashable
    most: int


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


@dataclass(frozen=True)
class LoadStats:
    """How long a load took, and the bytes that all copies of the model take together, for metrics."""

    milli_secs: int
    num_bytes: int
    copies: int = 1


class Ahead(Enum):
    """How far the load of a model is that was requested before there is work for it."""

    LOADING = auto()
    READY = auto()
    FAILED = auto()
    NO_ROOM = auto()


class HostLane(Protocol):
    """The queue of examples for one model version at a host."""

    handler: Handler[Any, Any, Any]
    settings: LaneSettings


class HostSession(Protocol):
    """One bundle's connection to a host; belongs to one thread."""

    def submit(self, lane: Any, prepared: Block, costs: Any, tag: Any, weights: Any = None) -> None:
        """Add a block to a lane; block while the lane is full."""
        ...

    def ready(self) -> list[Outcome]:
        """Return the outcomes that have arrived, without blocking."""
        ...

    def finish(self) -> Iterator[list[Outcome]]:
        """Yield all remaining outcomes as they arrive."""
        ...

    def take_stats(self) -> dict[Any, list[BatchStats]]:
        """Return the statistics of this session's batches, by lane."""
        ...

    def close(self) -> None:
        """Close the session and discard its examples that are not yet computed."""
        ...


class Host(Protocol):
    """A model host; its methods may be called from any thread."""

    def enter(self, key: Hashable, make_handler: Callable[[], Handler[Any, Any, Any]], settings: LaneSettings) -> Any:
        """Return the lane with this key, which the first caller creates."""
        ...

    def leave(self, lane: Any) -> None:
        """Leave a lane, once for each time that it was entered."""
        ...

    def open(self, step: Any = None) -> HostSession:
        """Open a session for the calling thread."""
        ...

    def load(self, lane: Any) -> None:
        """Block until the lane's model is in memory; raise the error of its load."""
        ...

    def load_ahead(self, lane: Any, instead_of: Any = None) -> Ahead:
        """Request a model before there is work for it, and return how far its load is."""
        ...

    def take_over(self, old: Any, new: Any) -> None:
        """Move the examples of a lane that are not yet cut into batches to another lane."""
        ...

    def take_load_stats(self, lanes: list[Any]) -> list[list[LoadStats]]:
        """Return, for each lane, the loads of its model since the last call."""
        ...
