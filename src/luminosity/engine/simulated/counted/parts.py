"""The parts of a counted run: the loop's own stages, buffers and pools, whose elements are numbers without any data.

Blocks have a number of elements and no bytes. So the loop starts, sizes, splits and retries bundles as in every run,
and nothing is encoded, written or grouped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from apache_beam.portability.api import beam_runner_api_pb2

from luminosity.engine.data import wire
from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.event_time import MIN
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.world import Clock, World
from luminosity.engine.folders import RunFolders
from luminosity.engine.loop.buffers import BufferRun, Outflow
from luminosity.engine.loop.failures import Failures
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.spill_policy import SpillPolicy
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.workers import PoolRun
from luminosity.engine.options import EngineConfig
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import Graph, Read, SideInput, Stage, Write
from luminosity.engine.resources.pools import Pool
from luminosity.engine.simulated.counted.workers import CountedCrew, Flow
from luminosity.engine.simulated.virtual_time import VirtualMailbox, VirtualTime
from luminosity.engine.spill.quota import Ledger

__all__ = ["MOST_ELEMENTS", "CountedPool", "CountedStage", "counted_parts", "give_workers"]

MOST_ELEMENTS = 4_000_000_000  # of a stage: a block's message has 32 bits for their number
_ELEMENT_BYTES = 64  # that an element counts for in a queue, so that limits of a few elements can be told apart
_NO_LIMIT = 1 << 62  # bytes, of queues and memory
_CODER = "element"
_DEVICES = ("declared:0",)


@dataclass(frozen=True)
class CountedStage:
    """A stage of a counted run."""

    id: str
    label: str
    pool: str
    elements: int  # that come in, over the whole run
    reads_from: tuple[str, ...] = ()  # ids of stages, each of which writes an equal part of the elements
    waits_for: tuple[str, ...] = ()  # ids of stages that must be done before it starts
    queue: float = float("inf")  # elements in the queue before it; at half of it, the writers are held back


@dataclass(frozen=True)
class CountedPool:
    """A pool of a counted run."""

    name: str
    workers: int
    most: int  # workers that it may ever have
    is_ahead: bool  # whether its workers start with the run, as those of devices do, or when there is work for them


class _Nothing:
    """The data of a block that has none."""

    def message(self, first: int, count: int, size: int) -> bytes:
        return _message(count)

    def read(self, first: int, count: int) -> bytes:
        raise AssertionError("elements of a counted run have no bytes")

    def free(self) -> None:
        pass


class _NoMemory(Ledger):
    """Counts nothing: blocks of a counted run take no memory."""

    @property
    def used(self) -> int:
        """No bytes."""
        return 0


class _NoFolders(RunFolders):
    """Stands for the folders of a run, and makes none."""

    def _make_all(self, spill_root: str, disk_root: str) -> None:
        self.memory = self.spill = self.sockets = self.main_classes = self.load_ahead = self.quota = self.url = ""

    def remove_blocks_of(self, worker_id: str, keep: set[str]) -> None:
        """Do nothing: no worker writes files."""


def counted_parts(
    stages: Sequence[CountedStage], pools: Sequence[CountedPool], time: VirtualTime, crew: CountedCrew
) -> RunParts:
    """Return the parts of a run in virtual time, with the workers of ``crew``. Writers come before readers."""
    graph = _graph(stages)
    pool_runs = _pools(pools, time.clock, crew)
    ledger = _NoMemory(None, _NO_LIMIT, sum(pool.most for pool in pools))
    blocks, state, codecs = BlockStore("", ledger), StateStore("", ledger), Codecs(graph)
    blocks.find_remote = lambda key: _Nothing()
    runs = {
        stage.id: StageRun(plan, pool_runs[stage.pool], 1, codecs, blocks, _NO_LIMIT, time.clock, has_test_stream=False)
        for plan, stage in zip(graph.stages, stages, strict=True)
    }
    policy = SpillPolicy(blocks, state, list(runs.values()))
    buffers: dict[bytes, BufferRun] = {}
    for stage in stages:
        buffers |= _buffers(stage, runs, policy, time.clock)
        crew.add_stage(stage.id, stage.elements, _flows(stage, stages))
        if not stage.reads_from:
            source = blocks.received(_message(stage.elements), MIN, 0)
            runs[stage.id].add(runs[stage.id].plan.reads[0].transform_id, source)
    return RunParts(
        stages=list(runs.values()),
        groupers={},
        buffers=buffers,
        outflows={s.id: Outflow((w.buffer_id, buffers[w.buffer_id]) for w in s.writes) for s in graph.stages},
        pools=list(pool_runs.values()),
        blocks=blocks,
        spill_policy=policy,
        state=state,
        server=crew,
        folders=_NoFolders(),
        launcher=crew,
        config=EngineConfig(None, None, "warn", "off", "fork", 1, _NO_LIMIT),
        metrics=RunMetrics(),
        failures=Failures(codecs),
        dead_letters=None,
        world=World(clock=time.clock, mailbox=lambda: VirtualMailbox(time)),
        test_streams=None,
        queue_limit=_NO_LIMIT,
        checkpoint=None,
        cluster=None,
        elastic=None,
        prints={},
    )


def give_workers(pool: PoolRun, workers: int) -> None:
    """Let a pool have so many workers from now on. Workers beyond them get no more bundles: end them when idle."""
    groups = (_DEVICES,) * workers if pool.plan.device_groups else ()
    pool.plan = replace(pool.plan, workers=workers, device_groups=groups)
    pool.places = dict.fromkeys(range(workers), "")


def _message(count: int) -> bytes:
    return wire.pack_object(count, wire.ObjectSpan("", 0, count * _ELEMENT_BYTES))


def _pools(pools: Sequence[CountedPool], clock: Clock, crew: CountedCrew) -> dict[str, PoolRun]:
    runs: dict[str, PoolRun] = {}
    writers = 0
    for pool in pools:
        groups = (_DEVICES,) * pool.most if pool.is_ahead else ()
        runs[pool.name] = PoolRun(Pool(pool.name, 1.0, 0, 1, groups, pool.most, ()), writers, clock)
        give_workers(runs[pool.name], pool.workers)
        crew.add_pool(pool.name, writers)
        writers += pool.most
    for run in runs.values():
        run.cpu_pools = [pool for pool in runs.values() if not pool.plan.device_groups]
    return runs


def _graph(stages: Sequence[CountedStage]) -> Graph:
    components = beam_runner_api_pb2.Components()
    for name, urn in (("bytes", "bytes"), ("window", "global_window"), (_CODER, "windowed_value")):
        components.coders[name].spec.urn = f"beam:coder:{urn}:v1"
    components.coders[_CODER].component_coder_ids.extend(("bytes", "window"))
    plans = (
        Stage(
            id=stage.id,
            label=stage.label,
            steps=(stage.label,),
            environment_id="",
            reads=tuple(Read(f"read {w}", _edge(w, stage.id), _CODER) for w in stage.reads_from or ("",)),
            writes=tuple(
                Write(f"write {reader.id}", _edge(stage.id, reader.id), _CODER)
                for reader in stages
                if stage.id in reader.reads_from
            ),
            side_inputs=tuple(SideInput("", w, _edge(w, stage.id)) for w in stage.waits_for),
        )
        for stage in stages
    )
    return Graph(tuple(plans), {}, components, {})


def _edge(writer: str, reader: str) -> bytes:
    return f"{writer}>{reader}".encode()


def _buffers(
    stage: CountedStage, runs: dict[str, StageRun], policy: SpillPolicy, clock: Clock
) -> dict[bytes, BufferRun]:
    """Return the buffers before a stage. One for whose writers it waits holds none of them back, as groups do."""
    run, limit = runs[stage.id], int(min(stage.queue * _ELEMENT_BYTES, _NO_LIMIT))
    buffers: dict[bytes, BufferRun] = {}
    for writer in dict.fromkeys((*(stage.reads_from or ("",)), *stage.waits_for)):
        waits = writer in stage.waits_for
        buffer = buffers[_edge(writer, stage.id)] = BufferRun(None, _NO_LIMIT if waits else limit, policy, clock)
        if writer:
            buffer.writers.append(runs[writer])
        if writer in (stage.reads_from or ("",)):
            buffer.readers.append((run, f"read {writer}"))
        if writer in stage.reads_from and not waits:
            runs[writer].feeds_queue = True
    return buffers


def _flows(stage: CountedStage, stages: Sequence[CountedStage]) -> list[Flow]:
    flows: list[Flow] = []
    for reader in stages:
        if stage.id in reader.reads_from:
            writers, place = len(reader.reads_from), reader.reads_from.index(stage.id)
            part = reader.elements // writers + (place < reader.elements % writers)
            flows.append(Flow(f"write {reader.id}", part, _ELEMENT_BYTES))
    return flows
