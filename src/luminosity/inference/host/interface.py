"""What steps and a model host know of each other, whether the host is in the same process or in the shared one."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from luminosity.inference.blocks import Block, Indices

__all__ = [
    "Ahead",
    "BatchStats",
    "Clock",
    "Family",
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
