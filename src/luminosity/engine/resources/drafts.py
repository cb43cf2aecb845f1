"""Pools, finished and while they are being sized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from luminosity.core import WorkerShare
from luminosity.engine.resources.machine import LeaseNeeds
from luminosity.engine.resources.python_environments import PythonEnvironment

__all__ = ["Draft", "Missing", "Pool", "StageToPlace"]


class StageToPlace(Protocol):
    """What the sizing of pools has to know of a stage."""

    @property
    def id(self) -> str:
        """The id of the stage."""
        ...

    @property
    def label(self) -> str:
        """The names of its steps, in messages."""
        ...

    @property
    def is_source(self) -> bool:
        """Whether it reads from outside the pipeline."""
        ...


@dataclass(frozen=True)
class Pool:
    """Worker processes with the same resources."""

    name: str
    cores_per_worker: float
    ram_per_worker: int
    slots: int  # bundles that one worker runs at once
    device_groups: tuple[tuple[str, ...], ...]  # one for each worker; () for a CPU pool
    workers: int
    labels: tuple[str, ...]  # of the stages that run here
    borrowed: int = 0  # further workers that may run while cores of other CPU pools are idle
    python: PythonEnvironment | None = None  # in which its workers run; None for that of this process
    lease: LeaseNeeds | None = None  # what each worker asks of a cluster; None on one machine
    # On a cluster, the id of the node with room for each worker: first for the pool's own ones, then for those on
    # borrowed cores; empty for one that waits for a node. The cluster may place a worker elsewhere.
    nodes: tuple[str, ...] = ()
    # On a cluster: --min_workers and --max_workers of the pool. Without a most, it has as many as there is room for.
    least: int = 0
    most: int | None = None

    def share(self, index: int) -> WorkerShare:
        """Return the share of the pool's worker number ``index``."""
        return WorkerShare(
            pool=self.name,
            cores=self.cores_per_worker,
            ram_bytes=self.ram_per_worker,
            # A cluster gives each worker its devices itself: for one beyond the plan, these only say how many.
            devices=self.device_groups[min(index, len(self.device_groups) - 1)] if self.device_groups else (),
            workers=self.workers + self.borrowed,
        )


@dataclass
class Draft:
    """A pool while it is being sized."""

    name: str
    labels: list[str]
    cores: float
    ram: int
    slots: int
    groups: list[tuple[str, ...]]
    workers: int = 1
    cores_are_asked_for: bool = False
    python: PythonEnvironment | None = None
    device_type: str = ""  # of the devices in ``groups``, on a cluster whose nodes differ

    @property
    def devices_per_worker(self) -> int:
        """How many devices each worker has."""
        return len(self.groups[0]) if self.groups else 0

    def join(self, other: Draft) -> None:
        """Let the steps of another pool run in this one, which then has what both ask for."""
        self.labels += other.labels
        self.ram = max(self.ram, other.ram)
        self.cores = max(self.cores, other.cores)
        self.slots = max(self.slots, other.slots)
        self.cores_are_asked_for |= other.cores_are_asked_for


@dataclass(frozen=True)
class Missing:
    """A resource that steps ask for and the machine does not have."""

    what: str
    consequence: str  # what happens instead
    is_ram: bool = False
