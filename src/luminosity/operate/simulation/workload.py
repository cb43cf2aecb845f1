"""What is simulated: stages with their measured work, pools of workers, and what to change from the measured run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import OptionError
from luminosity.events import PoolInfo

__all__ = ["AutoscaleRange", "Input", "PoolModel", "PoolOrder", "Scenario", "StageModel", "Workload", "pools_named"]


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


_MOST_NAMED = 6  # pools, in an error


@dataclass(frozen=True)
class PoolOrder:
    """What to give a pool. None means: as in the measured run."""

    name: str  # of the pool; "device" is every pool that has accelerators or runs models
    workers: int | None = None
    device: str = ""  # such as T4
    cores: float | None = None  # of one worker
    ram: float | None = None  # bytes
    speed: float | None = None  # of one worker, relative to the measured one
    startup_seconds: float | None = None


@dataclass(frozen=True)
class Scenario:
    """The run to simulate. None and empty fields mean: as in the measured run."""

    rows: float | None = None
    models: int | None = None
    pools: tuple[PoolOrder, ...] = ()
    cores: float | None = None  # that all workers share
    autoscale: tuple[tuple[str, AutoscaleRange], ...] = ()  # by the name of a pool; "" is what "device" is, or all
    preempted_per_hour: float = 0.0
    lost_at: tuple[float, ...] = ()
    measured_rows: float | None = None


def pools_named(name: str, pools: Sequence[PoolInfo], with_models: set[str]) -> list[str]:
    """Return the names of the pools that ``name`` stands for: its own, or for ``device`` those that run models.

    >>> pools_named("device", [PoolInfo("cpu", 1, 1), PoolInfo("gpu", 1, 8, ("gpu:0",))], set())
    ['gpu']
    """
    names = [pool.name for pool in pools]
    if name in names:
        return [name]
    if name == "device":
        found = [pool.name for pool in pools if pool.devices] or [each for each in names if each in with_models]
        if found:
            return found
    starting = [each for each in names if each.startswith(name)]
    if len(starting) == 1:
        return starting
    said = list_some([repr(each) for each in names], _MOST_NAMED)
    hint = did_you_mean(name, names)
    raise OptionError(
        f"no pool {name!r} in the measured run; found the pools {said}",
        fix=f"name one of them{f'; {hint}' if hint else ''}",
    )
