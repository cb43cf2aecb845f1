"""Setup of a run: makes the parts of the run from its plan."""

from __future__ import annotations

from apache_beam.options.value_provider import RuntimeValueProvider
from apache_beam.runners.common import ENCODED_IMPULSE_VALUE

from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.clock import Clock, ManualClock, WallClock
from luminosity.engine.data.grouping import Grouping
from luminosity.engine.data.live_grouping import LiveGrouping
from luminosity.engine.data.sideinputs import SideInputData
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.test_stream import TestStreams
from luminosity.engine.data.watermarks import MIN
from luminosity.engine.debugging.saving import Saver
from luminosity.engine.fnapi.server import FnApiServer
from luminosity.engine.folders import RunFolders
from luminosity.engine.loop.buffers import BufferRun, Outflow, queue_limit
from luminosity.engine.loop.failures import MAX_ATTEMPTS, Failures
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.spill_policy import SpillPolicy
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.workers import PoolRun
from luminosity.engine.options import EngineConfig
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import BufferKind, Graph
from luminosity.engine.resources.pools import Assignment
from luminosity.engine.spill.quota import Ledger
from luminosity.engine.workers import load_ahead, main_classes
from luminosity.engine.workers.debug import DebugWorkers
from luminosity.engine.workers.launcher import launcher, modules_to_preload

__all__ = ["set_up"]


def set_up(
    graph: Graph,
    assignments: dict[str, Assignment],
    config: EngineConfig,
    folders: RunFolders,
    metrics: RunMetrics,
    prints: dict[str, str],
) -> RunParts:
    """Return the parts of a run. Starts the Fn API server, which the caller stops, but no workers.

    ``prints`` are the sockets that workers write their standard streams to.
    """
    codecs = Codecs(graph)
    pools: dict[int, PoolRun] = {}
    writers = 0
    for assignment in assignments.values():
        if id(assignment.pool) not in pools:
            pools[id(assignment.pool)] = PoolRun(assignment.pool, first_writer=writers)
            writers += assignment.pool.workers + assignment.pool.borrowed
    cpu_pools = [pool for pool in pools.values() if not pool.plan.device_groups]
    for pool in cpu_pools:
        pool.cpu_pools = cpu_pools
    ledger = Ledger(folders.quota, config.memory_budget, writers)
    blocks = BlockStore(folders.spill, ledger)
    limit = queue_limit(ledger.limit, len(graph.buffers))
    stages = [
        StageRun(stage, pools[id(assignment.pool)], assignment.max_active_bundles, codecs, blocks, limit)
        for stage in graph.stages
        for assignment in (assignments[stage.id],)
    ]
    state = StateStore(folders.spill, ledger)
    clock, test_streams = WallClock(), None
    if graph.test_streams:
        clock = ManualClock()
        test_streams = TestStreams(graph.test_streams, codecs, blocks, clock)
    spill_policy = SpillPolicy(blocks, state, stages)
    buffers = _buffers(graph, codecs, folders.spill, stages, state, blocks, spill_policy, limit, clock)
    if test_streams is not None:
        for buffer_id, buffer in buffers.items():
            test_streams.connect(buffer_id, buffer.deliver, buffer.set_source_watermark)
    main_classes.save(folders.main_classes)
    saver = None
    if config.save_failed is not None:
        pickle_library = str(config.worker_options.get("pickle_library", "default"))
        saver = Saver(config.save_failed, graph, state, buffers, folders.main_classes, pickle_library)
    descriptors = {stage.id: graph.descriptor(stage, folders.url) for stage in graph.stages}
    if config.debug:
        RuntimeValueProvider.set_runtime_options(config.worker_options)  # as worker processes do
        server = process_launcher = DebugWorkers(state, descriptors)
    else:
        process_launcher = launcher(config.worker_start, modules_to_preload())
        _save_models_to_load(graph, assignments, pools, folders)
        server = FnApiServer(
            folders.url, state, descriptors
        )  # last, because it must be stopped if anything after it fails
    return RunParts(
        stages=stages,
        buffers=buffers,
        outflows={
            stage.id: Outflow((write.buffer_id, buffers[write.buffer_id]) for write in stage.writes)
            for stage in graph.stages
        },
        pools=list(pools.values()),
        blocks=blocks,
        spill_policy=spill_policy,
        state=state,
        server=server,
        folders=folders,
        launcher=process_launcher,
        config=config,
        metrics=metrics,
        failures=Failures(codecs, 1 if config.debug else MAX_ATTEMPTS, saver.save if saver is not None else None),
        prints=prints,
        clock=clock,
        test_streams=test_streams,
        queue_limit=limit,
    )


def _save_models_to_load(
    graph: Graph, assignments: dict[str, Assignment], pools: dict[int, PoolRun], folders: RunFolders
) -> None:
    """Let workers that start for models alone load them at once, before there is work for them."""
    for number, (pool_id, pool) in enumerate(pools.items()):
        stages = [stage.transforms for stage in graph.stages if id(assignments[stage.id].pool) == pool_id]
        path = f"{folders.load_ahead}-{number}"
        if load_ahead.save(path, stages, is_device=bool(pool.plan.device_groups)):
            pool.load_ahead = path


def _buffers(
    graph: Graph,
    codecs: Codecs,
    spill_folder: str,
    stages: list[StageRun],
    state: StateStore,
    blocks: BlockStore,
    spill_policy: SpillPolicy,
    limit: int,
    clock: Clock,
) -> dict[bytes, BufferRun]:
    buffers: dict[bytes, BufferRun] = {}
    for buffer in graph.buffers.values():
        grouping = live = None
        if buffer.kind is BufferKind.GROUP and buffer.is_unbounded:
            live = LiveGrouping(
                codecs.elements(buffer.coder_id),
                codecs.elements(buffer.output_coder_id),
                codecs.windowing(buffer.pcollection_id),
                state,
                blocks,
                clock,
                spill_folder,
            )
            spill_policy.live_groupings.append(live)
        elif buffer.kind is BufferKind.GROUP:
            grouping = Grouping(
                codecs.elements(buffer.coder_id),
                codecs.elements(buffer.output_coder_id),
                codecs.windowing(buffer.pcollection_id),
                state,
                blocks,
                spill_folder,
            )
            spill_policy.groupings.append(grouping)
        buffers[buffer.id] = BufferRun(grouping, limit, spill_policy, live, buffer.step)
    for run in stages:
        for write in run.plan.writes:
            buffers[write.buffer_id].writers.append(run)
            run.feeds_queue |= graph.buffers[write.buffer_id].kind is not BufferKind.GROUP
        for read in run.plan.reads:
            buffers[read.buffer_id].readers.append((run, read.transform_id))
            if graph.buffers[read.buffer_id].kind is BufferKind.IMPULSE:
                run.add(read.transform_id, blocks.of_bytes(ENCODED_IMPULSE_VALUE, 1, MIN))
        for side_input in run.plan.side_inputs:
            buffer = buffers[side_input.buffer_id]
            if buffer.side_input is None:
                plan = graph.buffers[side_input.buffer_id]
                codec = codecs.elements(plan.output_coder_id or plan.coder_id)
                buffer.side_input = SideInputData(codec, spill_folder, blocks.ledger)
                spill_policy.side_inputs.append(buffer.side_input)
                if buffer.grouping is not None:
                    # The coder of a side input can't follow references to large groups in the state store.
                    buffer.grouping.may_refer_to_state = False
                if buffer.live is not None:
                    buffer.live.may_refer_to_state = False
            state.add_side_input(side_input.transform_id, side_input.tag, buffer.side_input.read)
    return buffers
