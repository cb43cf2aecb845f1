"""Setup of a run: makes the parts of the run from its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from apache_beam.internal import pickler
from apache_beam.options.value_provider import RuntimeValueProvider
from apache_beam.portability.api import beam_fn_api_pb2, beam_runner_api_pb2
from apache_beam.runners.common import ENCODED_IMPULSE_VALUE
from apache_beam.transforms.window import BoundedWindow

from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.clock import Clock, ManualClock, WallClock
from luminosity.engine.data.grouping import Grouping
from luminosity.engine.data.panes.live_grouping import LiveGrouping
from luminosity.engine.data.sides.complete_side_input import SideInputData
from luminosity.engine.data.sides.live_side_input import LiveSideInput
from luminosity.engine.data.sides.side_gate import Side
from luminosity.engine.data.stable_input import StableInput
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.test_stream import TestStreams
from luminosity.engine.data.watermarks import MIN
from luminosity.engine.debugging.saving import Saver
from luminosity.engine.durable.resume import Checkpoint
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

if TYPE_CHECKING:
    from luminosity.engine.cluster.session import Session
    from luminosity.engine.node_workers.launcher import NodeLauncher

__all__ = ["set_up"]

_NO_CACHED_ARGUMENTS = "disable_global_windowed_args_caching"  # an experiment of Beam's


def set_up(
    graph: Graph,
    assignments: dict[str, Assignment],
    config: EngineConfig,
    folders: RunFolders,
    metrics: RunMetrics,
    prints: dict[str, str],
    checkpoint: Checkpoint | None = None,
    session: Session | None = None,
) -> RunParts:
    """Return the parts of a run. Starts the Fn API server, which the caller stops, but no workers.

    ``prints`` are the sockets that workers write their standard streams to. With ``session``, workers run on the
    nodes of the cluster that it is connected to.
    """
    codecs = Codecs(graph)
    if any(side_input.is_unbounded for stage in graph.stages for side_input in stage.side_inputs):
        # Otherwise Beam's workers keep the arguments of the first bundle if side inputs are in the global window.
        experiments = [*(config.worker_options.get("experiments") or ()), _NO_CACHED_ARGUMENTS]
        config = replace(config, worker_options={**config.worker_options, "experiments": experiments})
    pools: dict[int, PoolRun] = {}
    writers = 0
    for assignment in assignments.values():
        if id(assignment.pool) not in pools:
            pools[id(assignment.pool)] = PoolRun(assignment.pool, first_writer=writers)
            writers += assignment.pool.workers + assignment.pool.borrowed
    for stage in graph.stages:
        pools[id(assignments[stage.id].pool)].is_stream |= stage.has_endless_input
    cpu_pools = [pool for pool in pools.values() if not pool.plan.device_groups]
    for pool in cpu_pools:
        pool.cpu_pools = cpu_pools
    ledger = Ledger(folders.quota, config.memory_budget, writers)
    blocks = BlockStore(folders.spill, ledger)
    limit = queue_limit(ledger.limit, len(graph.buffers))
    stages = [
        StageRun(
            stage,
            pools[id(assignment.pool)],
            assignment.max_active_bundles,
            codecs,
            blocks,
            limit,
            has_test_stream=bool(graph.test_streams),
        )
        for stage in graph.stages
        for assignment in (assignments[stage.id],)
    ]
    state = StateStore(folders.spill, ledger)
    clock, test_streams = WallClock(), None
    if graph.test_streams:
        clock = ManualClock()
        test_streams = TestStreams(graph.test_streams, codecs, blocks, clock)
    spill_policy = SpillPolicy(blocks, state, stages)
    buffers = _buffers(graph, codecs, folders.spill, stages, state, blocks, spill_policy, limit, clock, checkpoint)
    if test_streams is not None:
        for buffer_id, buffer in buffers.items():
            test_streams.connect(buffer_id, buffer.deliver, buffer.set_source_watermark)
    hook = None
    if checkpoint is not None:
        running = list(pools.values())
        hook = checkpoint.attach(config, stages, buffers, running, blocks, state, metrics, spill_policy.check)
    main_classes.save(folders.main_classes)
    saver = None
    if config.save_failed is not None:
        pickle_library = str(config.worker_options.get("pickle_library", "default"))
        saver = Saver(config.save_failed, graph, state, buffers, folders.main_classes, pickle_library)
    descriptors: dict[str, beam_fn_api_pb2.ProcessBundleDescriptor] = {}
    on_nodes: NodeLauncher | None = None
    if config.debug:
        RuntimeValueProvider.set_runtime_options(config.worker_options)  # as worker processes do
        server = process_launcher = DebugWorkers(state, descriptors)
    else:
        _save_models_to_load(graph, assignments, pools, folders)
        # The server comes last, because it must be stopped if anything after it fails.
        if session is not None:
            from luminosity.engine.setup_on_nodes import set_up_on_nodes  # a run on one machine needs none of it

            server, on_nodes = set_up_on_nodes(graph, pools, folders, blocks, state, descriptors, checkpoint, session)
            process_launcher = on_nodes
        else:
            environments = [pool.plan.python for pool in pools.values() if pool.plan.python is not None]
            process_launcher = launcher(config.worker_start, modules_to_preload(), environments)
            server = FnApiServer(folders.url, state, descriptors)
    descriptors.update({stage.id: graph.descriptor(stage, folders.url) for stage in graph.stages})
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
        failures=Failures(
            codecs,
            1 if config.debug else MAX_ATTEMPTS,
            saver.save if saver is not None else None,
            config.element_timeout,
        ),
        prints=prints,
        clock=clock,
        test_streams=test_streams,
        queue_limit=limit,
        checkpoint=hook,
        cluster=on_nodes,
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
    checkpoint: Checkpoint | None,
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
        if checkpoint is not None and buffer.is_stable:
            buffers[buffer.id].stable = StableInput()
    for run in stages:
        _add_side_inputs(run, graph, buffers, codecs, spill_folder, state, blocks, spill_policy, clock)
    for run in stages:
        for write in run.plan.writes:
            buffers[write.buffer_id].writers.append(run)
            run.feeds_queue |= graph.buffers[write.buffer_id].kind is not BufferKind.GROUP
        for read in run.plan.reads:
            buffers[read.buffer_id].readers.append((run, read.transform_id))
            is_impulse = graph.buffers[read.buffer_id].kind is BufferKind.IMPULSE
            if is_impulse and (checkpoint is None or checkpoint.sends_impulse(run.plan, read)):
                run.add(read.transform_id, blocks.of_bytes(ENCODED_IMPULSE_VALUE, 1, MIN))
    return buffers


def _add_side_inputs(
    run: StageRun,
    graph: Graph,
    buffers: dict[bytes, BufferRun],
    codecs: Codecs,
    spill_folder: str,
    state: StateStore,
    blocks: BlockStore,
    spill_policy: SpillPolicy,
    clock: Clock,
) -> None:
    """Let a stage's side inputs be collected and served, and its elements wait for those that are unbounded."""
    transforms = {transform.unique_name: transform for transform in run.plan.transforms}
    sides: list[Side] = []
    for side_input in run.plan.side_inputs:
        buffer, plan = buffers[side_input.buffer_id], graph.buffers[side_input.buffer_id]
        codec = codecs.elements(plan.output_coder_id or plan.coder_id)
        transform = transforms[side_input.transform_id]
        if side_input.is_unbounded:
            if buffer.live_side_input is None:
                windowing = codecs.windowing(transform.inputs[side_input.tag])
                buffer.live_side_input = LiveSideInput(codec, windowing, spill_folder, blocks, clock)
                spill_policy.side_inputs.append(buffer.live_side_input)
                if buffer.live is not None:
                    # The coder of a side input can't follow references to large groups in the state store.
                    buffer.live.may_refer_to_state = False
            live = buffer.live_side_input
            main = [p for t in run.plan.reads for p in transforms[t.transform_id].outputs.values()]
            live.lateness = max(live.lateness, *(codecs.windowing(p).allowed_lateness.micros for p in main))
            sides.append(Side(live, codec, _window_mapping(transform, side_input.tag)))
            continue
        if buffer.side_input is None:
            buffer.side_input = SideInputData(codec, spill_folder, blocks.ledger)
            spill_policy.side_inputs.append(buffer.side_input)
            if buffer.grouping is not None:
                buffer.grouping.may_refer_to_state = False
        state.add_side_input(side_input.transform_id, side_input.tag, buffer.side_input.read)
    if sides:
        run.wait_for(sides)


def _window_mapping(transform: beam_runner_api_pb2.PTransform, tag: str) -> Callable[[BoundedWindow], BoundedWindow]:
    """Return the function that maps a window of a step's main input to a window of its side input."""
    payload = beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload)
    return pickler.loads(payload.side_inputs[tag].window_mapping_fn.payload)
