"""Assembles the parts of a run from its plan: pools, stages, buffers with their side inputs, and workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from apache_beam.internal import pickler
from apache_beam.options.value_provider import RuntimeValueProvider
from apache_beam.portability.api import beam_fn_api_pb2, beam_runner_api_pb2
from apache_beam.runners.common import ENCODED_IMPULSE_VALUE
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.window import BoundedWindow

from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.complete_side_input import SideInputData
from luminosity.engine.data.event_time import MIN
from luminosity.engine.data.grouping import Grouping
from luminosity.engine.data.live_side_input import LiveSideInput
from luminosity.engine.data.panes.live_grouping import LiveGrouping
from luminosity.engine.data.saved_rows import StableInput
from luminosity.engine.data.scripted_stream import TestStreams
from luminosity.engine.data.side_gate import Side
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.world import THIS_MACHINE, Clock, ManualClock, World
from luminosity.engine.debugging.dead_letters import DeadLetters
from luminosity.engine.debugging.late_elements import LateElements
from luminosity.engine.debugging.savefile import Saver
from luminosity.engine.durable.checkpointer import SavedParts
from luminosity.engine.durable.resume import Checkpoint
from luminosity.engine.elastic.elastic_pools import ElasticPools
from luminosity.engine.fnapi.connection import WorkerServer
from luminosity.engine.fnapi.server import FnApiServer
from luminosity.engine.folders import RunFolders
from luminosity.engine.loop.buffers import BufferRun, Outflow, Partitions, queue_limit
from luminosity.engine.loop.failures import MAX_ATTEMPTS, Failures
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.spill_policy import SpillPolicy
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.workers import PoolRun
from luminosity.engine.options import EngineConfig
from luminosity.engine.plan.codecs import Codecs, ElementCodec
from luminosity.engine.plan.graph import Buffer, BufferKind, Graph, Stage
from luminosity.engine.prepare import Prepared
from luminosity.engine.resources.pools import Assignment
from luminosity.engine.spill.quota import Ledger
from luminosity.engine.workers import worker_files
from luminosity.engine.workers.fork_launcher import launcher
from luminosity.engine.workers.launcher import Launcher
from luminosity.engine.workers.preloading import modules_to_preload, modules_with_openmp

if TYPE_CHECKING:
    from luminosity.engine.cluster.driver.node_launcher import NodeLauncher
    from luminosity.engine.cluster.driver.ray_connection import RayConnection

__all__ = ["Descriptors", "MakeWorkers", "assemble"]

Descriptors: TypeAlias = dict[
    str, beam_fn_api_pb2.ProcessBundleDescriptor
]  # by stage id; filled after the server is made
MakeWorkers: TypeAlias = Callable[[StateStore, Descriptors], tuple[WorkerServer, Launcher]]

_PART_OF_INTERVAL = 0.25  # of checkpoints: how long bundles are whose output waits for the next one
_LONGEST_UNHURRIED_S = 0.25  # longer ones would save little
_THREADS = "model_threads"  # an option for steps with models: their workers set this number after the fork
_NO_CACHED_ARGUMENTS = "disable_global_windowed_args_caching"  # an experiment of Beam's


@dataclass(frozen=True)
class _Data:
    """What stages and buffers of a run need to hold data."""

    graph: Graph
    codecs: Codecs
    blocks: BlockStore
    state: StateStore
    folders: RunFolders
    queue_limit: int  # bytes that may wait in one queue
    world: World

    @classmethod
    def of(
        cls, graph: Graph, config: EngineConfig, folders: RunFolders, pools: Sequence[PoolRun], world: World
    ) -> _Data:
        workers = sum(pool.plan.workers + pool.plan.borrowed for pool in pools)
        ledger = Ledger(folders.quota, config.memory_budget, workers)
        blocks, state = BlockStore(folders.spill, ledger), StateStore(folders.spill, ledger)
        limit = queue_limit(ledger.limit, len(graph.buffers), workers)
        return cls(graph, Codecs(graph), blocks, state, folders, limit, world)

    @property
    def clock(self) -> Clock:
        return self.world.clock


def assemble(
    prepared: Prepared,
    folders: RunFolders,
    metrics: RunMetrics,
    prints: dict[str, str],
    checkpoint: Checkpoint | None = None,
    world: World = THIS_MACHINE,
    make_workers: MakeWorkers | None = None,
) -> RunParts:
    """Return the parts of a run. Starts the Fn API server, which the caller stops, but no workers.

    ``prints`` are the sockets that workers write their standard streams to. In a simulation, ``world`` is another than
    this machine, and ``make_workers`` makes the server and the launcher of its workers.
    """
    graph = prepared.graph
    config = _without_cached_arguments(graph, prepared.config)
    if graph.test_streams:
        world = replace(world, clock=ManualClock(world.clock))
    pools = _pools(graph, prepared.assignments, world.clock)
    running = list(pools.values())
    data = _Data.of(graph, config, folders, running, world)
    stages = _stages(graph.stages, data, prepared.assignments, pools)
    groupers = _stages(graph.groupers, data, prepared.assignments, pools)
    spill_policy = SpillPolicy(data.blocks, data.state, [*stages, *groupers])
    late = None if config.late_elements is None else LateElements(config.late_elements)
    buffers = _buffers(data, spill_policy, late, is_durable=checkpoint is not None)
    for stage in stages:
        _add_side_inputs(stage, data, buffers, spill_policy)
    for stage in stages:
        _connect(stage, data, buffers, checkpoint)
    _connect_groupers(groupers, data, buffers, spill_policy)
    test_streams = _test_streams(data, buffers)
    hook = None
    if checkpoint is not None:
        saved = SavedParts(stages, buffers, running, data.blocks, data.state, metrics, spill_policy.check, world)
        hook = checkpoint.attach(config.checkpoint_interval, saved)
        seconds = min(_LONGEST_UNHURRIED_S, _PART_OF_INTERVAL * (config.checkpoint_interval or 0.0))
        for stage in stages:
            if graph.waits_at_intervals(stage.plan):
                stage.size.no_hurry(seconds)
    failures = _failures(data, config, buffers)
    _write_worker_files(prepared, pools, folders)
    # The server comes last, because it must be stopped if anything after it fails.
    descriptors: Descriptors = {}
    cluster: NodeLauncher | None = None
    if make_workers is not None:
        server, process_launcher = make_workers(data.state, descriptors)
    else:
        server, process_launcher, cluster = _workers(
            data, config, pools, stages, descriptors, checkpoint, prepared.connection
        )
    elastic = None
    if cluster is not None:
        limit, nodes = data.blocks.ledger.limit, prepared.machine.nodes
        elastic = ElasticPools(running, stages, buffers, config, limit, nodes, cluster.usable_nodes)
    descriptors.update({s.id: graph.descriptor(s, folders.url) for s in (*graph.stages, *graph.groupers)})
    return RunParts(
        stages=stages,
        groupers={buffer.id: run for buffer, run in zip(graph.split_buffers(), groupers, strict=True)},
        buffers=buffers,
        outflows=_outflows(graph, buffers),
        pools=running,
        blocks=data.blocks,
        spill_policy=spill_policy,
        state=data.state,
        server=server,
        folders=folders,
        launcher=process_launcher,
        config=config,
        metrics=metrics,
        failures=failures,
        dead_letters=None if config.dead_letters is None else DeadLetters(config.dead_letters),
        prints=prints,
        world=world,
        test_streams=test_streams,
        queue_limit=data.queue_limit,
        checkpoint=hook,
        cluster=cluster,
        elastic=elastic,
    )


def _without_cached_arguments(graph: Graph, config: EngineConfig) -> EngineConfig:
    """Let workers read unbounded side inputs for each bundle.

    Otherwise Beam's workers keep the arguments of the first bundle if side inputs are in the global window.
    """
    if not any(side_input.is_unbounded for stage in graph.stages for side_input in stage.side_inputs):
        return config
    experiments = [*(config.worker_options.get("experiments") or ()), _NO_CACHED_ARGUMENTS]
    return replace(config, worker_options={**config.worker_options, "experiments": experiments})


def _pools(graph: Graph, assignments: dict[str, Assignment], clock: Clock) -> dict[int, PoolRun]:
    """Return the pools of a plan by the id of their object."""
    pools: dict[int, PoolRun] = {}
    writers = 0
    for assignment in assignments.values():
        if id(assignment.pool) not in pools:
            pools[id(assignment.pool)] = PoolRun(assignment.pool, first_writer=writers, clock=clock)
            writers += assignment.pool.workers + assignment.pool.borrowed
    for stage in graph.stages:
        pools[id(assignments[stage.id].pool)].is_stream |= stage.has_endless_input
    cpu_pools = [pool for pool in pools.values() if not pool.plan.device_groups]
    for pool in cpu_pools:
        pool.cpu_pools = cpu_pools
    return pools


def _stages(
    plans: Sequence[Stage], data: _Data, assignments: dict[str, Assignment], pools: dict[int, PoolRun]
) -> list[StageRun]:
    return [
        StageRun(
            stage,
            pools[id(assignment.pool)],
            assignment.max_active_bundles,
            data.codecs,
            data.blocks,
            data.queue_limit,
            data.clock,
            has_test_stream=bool(data.graph.test_streams),
        )
        for stage in plans
        for assignment in (assignments[stage.id],)
    ]


def _buffers(
    data: _Data, spill_policy: SpillPolicy, late: LateElements | None, *, is_durable: bool
) -> dict[bytes, BufferRun]:
    buffers: dict[bytes, BufferRun] = {}
    for buffer in data.graph.buffers.values():
        grouping = live = None
        if buffer.kind is BufferKind.GROUP and buffer.is_unbounded:
            live = LiveGrouping(*_coding(data, buffer), data.state, data.blocks, data.clock, data.folders.spill)
            spill_policy.live_groupings.append(live)
            if late is not None:
                live.on_late = late.of(buffer.step, data.codecs.impl(buffer.coder_id).decode_nested)
        elif buffer.kind is BufferKind.GROUP:
            grouping = Grouping(*_coding(data, buffer), data.state, data.blocks, data.folders.spill)
            spill_policy.groupings.append(grouping)
        buffers[buffer.id] = BufferRun(grouping, data.queue_limit, spill_policy, data.clock, live, buffer.step)
        if is_durable and buffer.is_stable:
            buffers[buffer.id].stable = StableInput(is_patient=buffer.is_patient)
    return buffers


def _outflows(graph: Graph, buffers: dict[bytes, BufferRun]) -> dict[str, Outflow]:
    return {
        stage.id: Outflow((write.buffer_id, buffers[write.buffer_id]) for write in stage.writes)
        for stage in (*graph.stages, *graph.groupers)
    }


def _coding(data: _Data, buffer: Buffer) -> tuple[ElementCodec, ElementCodec, Windowing]:
    """Return the coders of a grouping's input and output, and its windowing."""
    codecs = data.codecs
    return (
        codecs.elements(buffer.coder_id),
        codecs.elements(buffer.output_coder_id),
        codecs.windowing(buffer.pcollection_id),
    )


def _add_side_inputs(run: StageRun, data: _Data, buffers: dict[bytes, BufferRun], spill_policy: SpillPolicy) -> None:
    """Let a stage's side inputs be collected and served, and its elements wait for those that are unbounded."""
    codecs = data.codecs
    transforms = {transform.unique_name: transform for transform in run.plan.transforms}
    sides: list[Side] = []
    for side_input in run.plan.side_inputs:
        buffer, plan = buffers[side_input.buffer_id], data.graph.buffers[side_input.buffer_id]
        codec = codecs.elements(plan.output_coder_id or plan.coder_id)
        transform = transforms[side_input.transform_id]
        if side_input.is_unbounded:
            if buffer.live_side_input is None:
                windowing = codecs.windowing(transform.inputs[side_input.tag])
                buffer.live_side_input = LiveSideInput(codec, windowing, data.folders.spill, data.blocks, data.clock)
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
            buffer.side_input = SideInputData(codec, data.folders.spill, data.blocks.ledger)
            spill_policy.side_inputs.append(buffer.side_input)
            if buffer.grouping is not None:
                buffer.grouping.may_refer_to_state = False
        data.state.add_side_input(side_input.transform_id, side_input.tag, buffer.side_input.read)
    if sides:
        run.wait_for(sides)


def _window_mapping(transform: beam_runner_api_pb2.PTransform, tag: str) -> Callable[[BoundedWindow], BoundedWindow]:
    """Return the function that maps a window of a step's main input to a window of its side input."""
    payload = beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload)
    return pickler.loads(payload.side_inputs[tag].window_mapping_fn.payload)


def _connect(run: StageRun, data: _Data, buffers: dict[bytes, BufferRun], checkpoint: Checkpoint | None) -> None:
    """Make a stage a writer and a reader of its buffers, and give it the impulses that it reads."""
    kinds = data.graph.buffers
    for write in run.plan.writes:
        buffers[write.buffer_id].writers.append(run)
        run.feeds_queue |= kinds[write.buffer_id].kind is not BufferKind.GROUP
    for read in run.plan.reads:
        buffers[read.buffer_id].readers.append((run, read.transform_id))
        is_impulse = kinds[read.buffer_id].kind is BufferKind.IMPULSE
        if is_impulse and (checkpoint is None or checkpoint.sends_impulse(run.plan, read)):
            run.add(read.transform_id, data.blocks.of_bytes(ENCODED_IMPULSE_VALUE, 1, MIN))


def _connect_groupers(
    groupers: Sequence[StageRun], data: _Data, buffers: dict[bytes, BufferRun], spill_policy: SpillPolicy
) -> None:
    """Let groupers take over what is split, and pass on their groups to the readers of the groupings."""
    for plan, grouper in zip(data.graph.split_buffers(), groupers, strict=True):
        buffer = buffers[plan.id]
        assert buffer.grouping is not None
        (read,), (write,) = grouper.plan.reads, grouper.plan.writes
        buffer.grouper = grouper
        buffer.grouping.may_split(partial(grouper.add, read.transform_id))
        buffers[read.buffer_id] = Partitions(buffer, buffer.grouping, spill_policy, data.clock)
        buffers[write.buffer_id] = grouped = BufferRun(None, data.queue_limit, spill_policy, data.clock)
        grouped.writers.append(grouper)
        grouped.readers = buffer.readers
        grouper.feeds_queue = True
    data.blocks.adopt_group = data.state.adopt_group


def _test_streams(data: _Data, buffers: dict[bytes, BufferRun]) -> TestStreams | None:
    if not data.graph.test_streams:
        return None
    assert isinstance(data.clock, ManualClock)
    streams = TestStreams(data.graph.test_streams, data.codecs, data.blocks, data.clock, data.world.start_thread)
    for buffer_id, buffer in buffers.items():
        streams.connect(buffer_id, buffer.deliver, buffer.set_source_watermark)
    return streams


def _failures(data: _Data, config: EngineConfig, buffers: dict[bytes, BufferRun]) -> Failures:
    """Return what decides about bundles that fail, and with ``--save_failed`` saves the element."""
    save = None
    if config.save_failed is not None:
        pickle_library = str(config.worker_options.get("pickle_library", "default"))
        saver = Saver(config.save_failed, data.graph, data.state, buffers, data.folders.main_classes, pickle_library)
        save = saver.save
    attempts, passes_by = 1 if config.debug else MAX_ATTEMPTS, config.dead_letters is not None
    return Failures(data.codecs, attempts, save, config.element_timeout, passes_by=passes_by)


def _write_worker_files(prepared: Prepared, pools: dict[int, PoolRun], folders: RunFolders) -> None:
    """Write the script's classes, and models that workers that start for them alone load before there is work."""
    worker_files.save(folders.main_classes)
    if prepared.config.debug:
        return
    graph, assignments = prepared.graph, prepared.assignments
    for number, (pool_id, pool) in enumerate(pools.items()):
        stages = [stage.transforms for stage in graph.stages if id(assignments[stage.id].pool) == pool_id]
        path = f"{folders.load_ahead}-{number}"
        if worker_files.save_models(path, stages, is_device=bool(pool.plan.device_groups)):
            pool.load_ahead = path


def _workers(
    data: _Data,
    config: EngineConfig,
    pools: dict[int, PoolRun],
    stages: Sequence[StageRun],
    descriptors: Descriptors,
    checkpoint: Checkpoint | None,
    connection: RayConnection | None,
) -> tuple[WorkerServer, Launcher, NodeLauncher | None]:
    """Return the server of the workers, what launches them, and the same once more if it does so on a cluster."""
    graph, state, folders = data.graph, data.state, data.folders
    on_nodes: NodeLauncher | None = None
    if config.debug:
        from luminosity.engine.workers.in_process import DebugWorkers  # Beam's worker: other runs need it in workers
        from luminosity.engine.workers.sdk.passing import pass_failing_elements_by

        if config.dead_letters is not None:
            pass_failing_elements_by()
        RuntimeValueProvider.set_runtime_options(config.worker_options)  # as worker processes do
        server = process_launcher = DebugWorkers(state, descriptors)
    elif connection is not None:
        from luminosity.engine.cluster.driver.set_up import set_up_on_nodes  # a run on one machine needs none of it

        server, on_nodes = set_up_on_nodes(
            graph, pools, folders, data.blocks, state, descriptors, checkpoint, connection
        )
        process_launcher = on_nodes
    else:
        environments = [pool.plan.python for pool in pools.values() if pool.plan.python is not None]
        own = [pool.environment(0) for pool in pools.values() if pool.plan.python is None]
        has_own_number = config.worker_options.get(_THREADS) is not None
        openmp = None if has_own_number else modules_with_openmp(own)
        process_launcher = launcher(
            config.worker_start,
            modules_to_preload(),
            environments,
            openmp,
            progress=lambda: sum(stage.bundles_done for stage in stages),
        )
        server = FnApiServer(folders.url, state, descriptors)
    return server, process_launcher, on_nodes
