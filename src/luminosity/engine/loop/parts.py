"""Everything that the loop works on, and the listener that it notifies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.scripted_stream import TestStreams
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.world import Clock, World
from luminosity.engine.fnapi.connection import WorkerServer
from luminosity.engine.folders import RunFolders
from luminosity.engine.loop.buffers import BufferRun, Outflow
from luminosity.engine.loop.bundle import Attempt, AttemptWorker, Bundle
from luminosity.engine.loop.failures import Failures
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.spill_policy import SpillPolicy
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.workers import CheckpointWritten, PoolRun, Worker
from luminosity.engine.options import EngineConfig
from luminosity.engine.workers.failure import Failure
from luminosity.engine.workers.launcher import Launcher
from luminosity.engine.workers.sdk.bundle_report import Stall
from luminosity.events import NodeView

__all__ = ["CheckpointHook", "CheckpointProgress", "ClusterView", "ElasticHook", "LoopListener", "RunParts"]


@dataclass(frozen=True)
class RunParts:
    """The parts of one run, as :mod:`luminosity.engine.assemble` makes them.

    The loop releases the stages, buffers and state when it ends. :class:`luminosity.engine.run.Run` stops the server
    and removes the folders.
    """

    stages: list[StageRun]  # those of the plan, in topological order
    groupers: dict[bytes, StageRun]  # by the id of the grouping's buffer
    buffers: dict[bytes, BufferRun]  # by buffer id
    outflows: dict[str, Outflow]  # by stage id
    pools: list[PoolRun]
    blocks: BlockStore
    spill_policy: SpillPolicy
    state: StateStore
    server: WorkerServer
    folders: RunFolders
    launcher: Launcher
    config: EngineConfig
    metrics: RunMetrics
    failures: Failures
    dead_letters: LetterBox | None  # where elements are described that were passed by
    world: World
    test_streams: TestStreams | None
    queue_limit: int  # bytes that may wait in one queue
    checkpoint: CheckpointHook | None  # if the run is kept in a folder
    cluster: ClusterView | None  # on whose nodes the workers run
    elastic: ElasticHook | None  # decides how many workers the pools have, on a cluster
    prints: dict[str, str]  # the number of a standard stream → the socket that workers print to; empty: they inherit it

    def all_stages(self) -> list[StageRun]:
        """Return all stages in topological order: groupers come right before the first stage that reads the groups."""
        found: dict[StageRun, None] = {}
        for stage in self.stages:
            found |= {self.groupers[r.buffer_id]: None for r in stage.plan.reads if r.buffer_id in self.groupers}
            found[stage] = None
        return list(found)

    @property
    def clock(self) -> Clock:
        """The clock of the run."""
        return self.world.clock


@dataclass
class CheckpointProgress:
    """The checkpoints that were written since this start."""

    count: int = 0
    last_at: float | None = None  # when the last one was written, by the monotonic clock
    last_seconds: float = 0.0  # how long it took, from the first change that it collected
    copy_lag_s: float | None = None  # for how long there has been something that the copy lacks; None: there is no copy


class CheckpointHook(Protocol):
    """Saves the run in a folder from time to time, so that a later start can continue it.

    All calls come on the loop's thread, and only :meth:`before_end` waits.
    """

    progress: CheckpointProgress

    def start(self, notify: Callable[[CheckpointWritten], None]) -> None:
        """Start to write. ``notify`` is called on another thread for each checkpoint that was written."""
        ...

    def tick(self, now: float) -> None:
        """Save what has changed, if it is time to."""
        ...

    def next_due(self) -> float:
        """Return when the next checkpoint is due."""
        ...

    def finalize_later(self, attempt: Attempt) -> None:
        """Keep a committed attempt until it is saved: its finalization callbacks must not run earlier."""
        ...

    def will_finalize_in(self, worker: AttemptWorker) -> bool:
        """Return whether attempts of a worker wait for their finalization."""
        ...

    def written(self, message: CheckpointWritten) -> list[Attempt]:
        """Pass on what waited for a checkpoint, and return the attempts whose finalization callbacks may run now.

        Raises what prevented a checkpoint.
        """
        ...

    def has_side_inputs(self, stage_id: str) -> bool:
        """Return whether a checkpoint was written since the first call for this stage, whose side inputs are complete.

        If not, one is written soon.
        """
        ...

    def has_unsaved(self) -> bool:
        """Return whether attempts wait for their finalization."""
        ...

    def before_end(self, state: str) -> None:
        """Save everything, with the state in which the run ends. Waits until it is on the disk."""
        ...


class ElasticHook(Protocol):
    """Decides how many workers pools have while the run lasts. The loop's thread calls it; nothing waits."""

    def look(self, now: float, start: Callable[[PoolRun, int], None], end: Callable[[Worker], None]) -> None:
        """Change the places of pools, start the workers that are wanted, and end those that are not."""
        ...


class LetterBox(Protocol):
    """Keeps letters about elements that were passed by. The loop's thread calls it."""

    def write(self, lines: bytes) -> Mapping[str, int]:
        """Put the letters of a bundle that is about to be committed on the disk. Return their number by step."""
        ...


class ClusterView(Protocol):
    """What a run knows of the cluster that it runs on. Any thread may ask."""

    def nodes(self) -> tuple[NodeView, ...]:
        """Return the nodes that the run uses, as they were a moment ago."""
        ...

    def object_bytes(self) -> int:
        """Return the bytes of the blocks in the cluster's stores, without second copies."""
        ...


class LoopListener(Protocol):
    """Receives what happens in the loop. All calls come on the loop's thread and must return quickly."""

    def tick(self) -> None:
        """Note that the loop has handled all messages that had arrived. Called many times a second."""
        ...

    def worker_started(self, worker: Worker) -> None:
        """Note that a worker has connected."""
        ...

    def worker_lost(self, worker: Worker, reason: str) -> None:
        """Note that a worker's process ended unexpectedly. ``worker.bundles`` still holds what it was running."""
        ...

    def worker_ends(self, worker: Worker) -> None:
        """Note that the loop is about to end a worker."""
        ...

    def worker_ended(self, worker: Worker) -> None:
        """Note that the process of a worker that the loop has ended is gone, or will be soon."""
        ...

    def bundle_stalled(self, bundle: Bundle, stall: Stall) -> None:
        """Note that a bundle does not go on. Called again when that has lasted for twice as long."""
        ...

    def bundle_retried(self, bundle: Bundle, failure: Failure) -> None:
        """Note that user code raised and that the whole bundle will be retried."""
        ...
