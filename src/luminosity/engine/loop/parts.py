"""Everything that a run works on."""

from __future__ import annotations

from dataclasses import dataclass

from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.state import StateStore
from luminosity.engine.fnapi.connection import WorkerServer
from luminosity.engine.folders import RunFolders
from luminosity.engine.loop.buffers import BufferRun, Outflow
from luminosity.engine.loop.failures import Failures
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.spill_policy import SpillPolicy
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.workers import PoolRun
from luminosity.engine.options import EngineConfig
from luminosity.engine.workers.launcher import Launcher


@dataclass(frozen=True)
class RunParts:
    """What the loop works on, set up by :mod:`luminosity.engine.setup`."""

    stages: list[StageRun]  # in topological order
    buffers: dict[bytes, BufferRun]
    outflows: dict[str, Outflow]  # by stage
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
    queue_limit: int
    prints: dict[str, str]  # where workers print to, by the number of the stream, if not to this process's own
