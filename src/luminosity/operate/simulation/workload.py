"""What is simulated: stages with their measured work, pools of workers, and what may happen to them."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["AutoscaleRange", "Input", "PoolModel", "StageModel", "Workload"]


@dataclass(frozen=True)
class Input:
    """A number that the simulation uses, and where it comes from."""

    name: str
    value: str
    is_measured: bool  # otherwise it is assumed, or given on the command line
    note: str = ""


@dataclass(frozen=True)
class AutoscaleRange:
    """How many workers an autoscaled pool has at least and at most."""

    least: int
    most: int


@dataclass(frozen=True)
class StageModel:
    """A stage: the work of one row, and what it waits for. All stages count in rows of the whole run's input."""

    id: str
    label: str
    pool: str
    reads_from: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()  # stages that must be done before it starts
    seconds_per_row: float = 0.0  # of one worker
    cores: float = 0.0  # that a running bundle uses, on average; 0 if not known
    # Measured bundles, to resample: how long each took, relative to the mean, and its share of all their elements.
    spread: tuple[float, ...] = (1.0,)
    weights: tuple[float, ...] = (1.0,)
    rows_per_bundle: float = 1.0  # of a measured bundle
    queue_rows: float = float("inf")  # in its input queue at which its writers are held back


@dataclass(frozen=True)
class PoolModel:
    """A pool of equal workers."""

    name: str
    workers: int
    startup_seconds: float = 0.0  # from the decision to start a worker until it can run bundles
    load_seconds: float = 0.0  # that models take to load in each new worker
    autoscale: AutoscaleRange | None = None
    cores: float = 0.0  # this and the following: of one worker, for the bill; 0 or empty if not known
    ram: float = 0.0  # bytes
    device: str = ""
    devices: float = 0  # that one worker has
    start_gap: float = 0.0  # seconds between the starts of two workers: their starts share the cores

    @property
    def most_workers(self) -> int:
        """The largest number of workers that it may have."""
        return self.autoscale.most if self.autoscale is not None else self.workers


@dataclass(frozen=True)
class Workload:
    """A run to simulate."""

    rows: float
    stages: tuple[StageModel, ...]  # writers before readers
    pools: tuple[PoolModel, ...]
    cores: float = float("inf")  # that all workers share
    ram: float = 0.0  # bytes that all workers share, for the bill; 0 if each has its own
    fixed_seconds: float = 0.0  # of the whole run, beside its stages
    preempted_per_hour: float = 0.0  # how often each worker is lost
    lost_at: tuple[float, ...] = ()  # seconds at which the first worker of the first pool is lost
    inputs: tuple[Input, ...] = field(default=(), compare=False)
