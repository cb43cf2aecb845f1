"""One run of a pipeline: set up, loop, clean up, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from apache_beam.runners.common import ENCODED_IMPULSE_VALUE
from apache_beam.runners.runner import PipelineState

from luminosity.engine.blocks import Block
from luminosity.engine.events import MemoryUse, Subscriber
from luminosity.engine.fnapi.server import FnApiServer
from luminosity.engine.fnapi.state import StateStore
from luminosity.engine.folders import RunFolders
from luminosity.engine.loop.buffers import BufferRun
from luminosity.engine.loop.grouping import Grouping
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.reporter import Reporter
from luminosity.engine.loop.scheduler import RunParts, Scheduler
from luminosity.engine.loop.snapshots import Snapshots
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.watermarks import MIN
from luminosity.engine.loop.workers import PoolRun
from luminosity.engine.options import EngineConfig
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import BufferKind, Graph
from luminosity.engine.pools import Assignment
from luminosity.engine.recorder import recorder
from luminosity.engine.sampling import Sampler
from luminosity.engine.subscribers import EventStream
from luminosity.engine.views import choose
from luminosity.engine.workers import mainclasses
from luminosity.engine.workers.launcher import launcher
from luminosity.engine.workers.printed import WorkerPrints
from luminosity.errors import RunCancelled, RunFailed

_ENDINGS: dict[str, Literal["done", "failed", "cancelled"]] = {
    PipelineState.DONE: "done",
    PipelineState.FAILED: "failed",
    PipelineState.CANCELLED: "cancelled",
}


class Run:
    """Starts on construction. ``state``, ``metrics`` and ``wait`` may be used from any thread."""

    def __init__(
        self,
        graph: Graph,
        assignments: dict[str, Assignment],
        config: EngineConfig,
        on_event: Subscriber | None = None,
    ) -> None:
        self.metrics = RunMetrics()
        self.state: str = PipelineState.RUNNING
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] | None = None
        self._done = threading.Event()
        self._folders = RunFolders()
        # A live view needs the terminal for itself: what workers print goes through this process.
        self._prints = WorkerPrints(self._folders.sockets) if choose.is_live(config.progress) else None
        try:
            prints = self._prints.sockets if self._prints is not None else {}
            parts = _set_up(graph, assignments, config, self._folders, self.metrics, prints)
        except BaseException:
            self._remove_folders()
            raise
        self._server = parts.server
        listeners = (choose.view(config.progress), recorder(config.run_dir), on_event)
        stream = EventStream([listener for listener in listeners if listener is not None])
        self._sampler = Sampler([d for pool in parts.pools for group in pool.pool.device_groups for d in group])
        if stream.is_heard:
            self._sampler.start()
        memory = _memory_use(parts)
        self._reporter = Reporter(Snapshots(parts, memory, self._sampler), stream, memory().limit)
        self._scheduler = Scheduler(parts, self._reporter)
        # Not a daemon: a script that ends without waiting for its pipeline still gets its results.
        self._thread = threading.Thread(target=self._run, name="luminosity-run")
        self._thread.start()

    def wait(self, seconds: float | None) -> bool:
        """Whether the run has ended within ``seconds``."""
        return self._done.wait(seconds)

    def cancel(self) -> None:
        self._scheduler.cancel()

    def _run(self) -> None:
        try:
            self._scheduler.run()
            self.state = PipelineState.DONE
        except RunCancelled as error:
            self.state, self.failure = PipelineState.CANCELLED, error
        except BaseException as error:
            # Whatever it is, whoever waits for the run must hear of it.
            self.state, self.failure = PipelineState.FAILED, error
        finally:
            try:
                self._server.stop()
                self._remove_folders()
                self._sampler.stop()
                self._reporter.ended(_ENDINGS[self.state], _headline(self.failure))
                if self.state == PipelineState.FAILED and self.on_failure is not None:
                    self.on_failure()
            finally:
                self._done.set()  # whoever waits must not wait for ever

    def _remove_folders(self) -> None:
        if self._prints is not None:
            self._prints.stop()
        self._folders.remove()


def _headline(failure: BaseException | None) -> str:
    if failure is None:
        return ""
    return failure.headline if isinstance(failure, RunFailed) else f"{type(failure).__name__}: {failure}"


def _memory_use(parts: RunParts) -> Callable[[], MemoryUse]:
    """What snapshots show of the bytes that the engine holds."""
    peak = 0

    def memory_use() -> MemoryUse:
        nonlocal peak
        used = sum(stage.queued_bytes for stage in parts.stages)
        peak = max(peak, used)
        return MemoryUse(used, peak)

    return memory_use


def _set_up(
    graph: Graph,
    assignments: dict[str, Assignment],
    config: EngineConfig,
    folders: RunFolders,
    metrics: RunMetrics,
    prints: dict[str, str],
) -> RunParts:
    codecs = Codecs(graph)
    pools: dict[int, PoolRun] = {}
    stages: list[StageRun] = []
    for stage in graph.stages:
        assignment = assignments[stage.id]
        pool = pools.setdefault(id(assignment.pool), PoolRun(assignment.pool))
        stages.append(StageRun(stage, pool, assignment.max_active_bundles, codecs))
    state = StateStore()
    buffers = _buffers(graph, codecs, folders, stages, state)
    mainclasses.save(folders.main_classes)
    process_launcher = launcher(config.worker_start)
    descriptors = {stage.id: graph.descriptor(stage, folders.url) for stage in graph.stages}
    return RunParts(
        stages=stages,
        buffers=buffers,
        pools=list(pools.values()),
        codecs=codecs,
        state=state,
        server=FnApiServer(folders.url, state, descriptors),  # the last thing that can fail, since it must be stopped
        folders=folders,
        launcher=process_launcher,
        config=config,
        metrics=metrics,
        prints=prints,
    )


def _buffers(
    graph: Graph, codecs: Codecs, folders: RunFolders, stages: list[StageRun], state: StateStore
) -> dict[bytes, BufferRun]:
    buffers: dict[bytes, BufferRun] = {}
    for buffer in graph.buffers.values():
        grouping = None
        if buffer.kind is BufferKind.GROUP:
            grouping = Grouping(
                codecs.elements(buffer.coder_id),
                codecs.elements(buffer.output_coder_id),
                codecs.windowing(buffer.pcollection_id),
                state,
            )
        buffers[buffer.id] = BufferRun(folders, grouping)
    for run in stages:
        for write in run.stage.writes:
            buffers[write.buffer_id].writers.append(run)
        for read in run.stage.reads:
            buffers[read.buffer_id].readers.append((run, read.transform_id))
            if graph.buffers[read.buffer_id].kind is BufferKind.IMPULSE:
                run.add(read.transform_id, Block.of_bytes(ENCODED_IMPULSE_VALUE, 1, MIN))
        for side_input in run.stage.side_inputs:
            plan = graph.buffers[side_input.buffer_id]
            codec = codecs.elements(plan.output_coder_id or plan.coder_id)
            data = buffers[side_input.buffer_id].as_side_input(codec)
            state.add_side_input(side_input.transform_id, side_input.tag, data.read)
    return buffers
