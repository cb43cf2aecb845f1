"""Pools, stages and nodes that are made up, for tests of elastic pools: nothing starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from apache_beam.options.pipeline_options import PipelineOptions

from luminosity.engine.data.world import WallClock
from luminosity.engine.elastic.elastic_pools import ElasticPools
from luminosity.engine.loop.buffers import BufferRun
from luminosity.engine.loop.sizing import BundleSize
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.workers import PoolRun, Worker
from luminosity.engine.options import EngineConfig
from luminosity.engine.resources.drafts import Pool
from luminosity.engine.resources.machine import LeaseNeeds, Node

CONFIG = replace(EngineConfig.of(PipelineOptions(["--progress=off"])), idle_timeout=10.0)
CPU, GPU = LeaseNeeds(1.0, 0, 0), LeaseNeeds(0.0, 0, 1)


def node(name: str, cores: float = 2.0, gpus: float = 0.0) -> Node:
    return Node(name, name, cores, 0, gpus)


def pool(name: str, *nodes: str, needs: LeaseNeeds = CPU, least: int = 0, most: int | None = None) -> PoolRun:
    groups = tuple((f"ray:{index}",) for index in range(len(nodes))) if needs.gpus else ()
    plan = Pool(name, 1.0, 0, 1, groups, len(nodes), (), lease=needs, nodes=nodes, least=least, most=most)
    return PoolRun(plan, first_writer=0, clock=WallClock())


def stage(of: PoolRun, *, queued: int = 0, done: int = 0, seconds: float = 0.0, name: str = "step") -> Any:
    """A stage that has ended bundles of ten elements, each of which took ``seconds`` for an element."""
    size = BundleSize()
    for _ in range(5 if seconds else 0):
        size.learn(10, 10 * seconds)
    plan = SimpleNamespace(reads=[], has_endless_input=False)
    return SimpleNamespace(
        id=name,
        pool=of,
        plan=plan,
        queued=queued,
        retries=[],
        elements_done=done,
        sized_work=None,
        size=size,
        is_done=lambda: False,
    )


class Cluster:
    """The nodes of a cluster and the pools of a run there, whose workers start as the test says."""

    def __init__(self, stages: Sequence[Any], *nodes: Node, buffers: Any = None, **options: Any) -> None:
        self.nodes = nodes
        self.now = 0.0
        self.asked: list[Worker] = []
        self.ended: list[Worker] = []
        pools = list(dict.fromkeys(each.pool for each in stages))
        self.elastic = ElasticPools(
            pools,
            cast("Sequence[StageRun]", stages),
            cast("dict[bytes, BufferRun]", buffers or {}),
            replace(CONFIG, **options),
            1 << 30,
            nodes,
            lambda: self.nodes,
        )
        for each in pools:
            for index, place in each.places.items():
                self.connect(self.worker(each, index), place)

    def worker(self, of: PoolRun, index: int) -> Worker:
        worker = of.workers[index] = Worker(of, index)
        worker.asked_at = self.now
        return worker

    def connect(self, worker: Worker, on: str) -> None:
        if on:
            worker.process = cast(Any, SimpleNamespace(node=lambda: on, is_leaving=lambda: False))
            worker.has_connected()

    def look(self, now: float) -> int:
        """Look at this time; return how many workers were asked for."""
        self.now = now
        before = len(self.asked)
        self.elastic.look(now, lambda pool, index: self.asked.append(self.worker(pool, index)), self._end)
        return len(self.asked) - before

    def _end(self, worker: Worker) -> None:
        worker.is_leaving = True
        self.ended.append(worker)
