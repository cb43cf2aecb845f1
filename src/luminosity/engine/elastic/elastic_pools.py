"""Pools of a run on a cluster: their places on its nodes, and how many workers they ask for beyond those.

A *place* is room for a worker: on a node that is there, or on one that the cluster is asked to bring. Places on nodes
that are there cost nothing more, so all of them are used, also those on nodes that join while the run lasts. Workers
for nodes to come are asked for by the rule in ``rule.py``, all at once, and only as far as the options allow.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from luminosity.engine.elastic import rule
from luminosity.engine.elastic.work_left import WorkLeft, work_left
from luminosity.engine.loop.buffers import BufferRun, queue_limit
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.workers import PoolRun, Worker
from luminosity.engine.options import EngineConfig
from luminosity.engine.resources.growth import Growing, more_places
from luminosity.engine.resources.machine import LeaseNeeds, Node

__all__ = ["ElasticPools"]

_LOGGER = logging.getLogger(__name__)

_LONGEST_START_S = 900.0  # a longer wait for a node is that of a cluster without room, not of a machine that starts


class ElasticPools:
    """The pools of a run on a cluster, which grow and shrink with its nodes and with the work that is left.

    Only the loop's thread uses it; nothing waits.
    """

    def __init__(
        self,
        pools: Sequence[PoolRun],
        stages: Sequence[StageRun],
        buffers: Mapping[bytes, BufferRun],
        config: EngineConfig,
        memory_limit: int,
        planned: Sequence[Node],
        nodes: Callable[[], tuple[Node, ...]],
    ) -> None:
        """Give each pool its first places: those with room now, and what ``--min_workers`` asks for.

        ``memory_limit`` is the memory budget in bytes. The plan was made for the nodes ``planned``; ``nodes`` returns
        those on which workers may run now.
        """
        self._pools = sorted(pools, key=lambda pool: not pool.plan.device_groups)  # accelerators first
        self._stages = stages
        self._buffers = buffers
        self._config = config
        self._memory_limit = memory_limit
        self._nodes = nodes
        self._placed_on = frozenset(node.id for node in planned)
        self._done: set[PoolRun] = set()
        self._starts: dict[PoolRun, float] = {}  # how long a worker on a node to come took to start
        self._idle_since: dict[str, tuple[float, float]] = {}  # by worker: when it was seen idle first, its busy time
        for pool in self._pools:
            least = max(1, pool.plan.least)
            pool.places = {index: node for index, node in pool.places.items() if node or index < least}
            unused = pool.unused_indexes()
            while len(pool.places) < least:
                pool.places[next(unused)] = ""
            pool.wanted = len(pool.places)

    def look(self, now: float, start: Callable[[PoolRun, int], None], end: Callable[[Worker], None]) -> None:
        """Change the places of the pools. ``start`` asks for a worker, ``end`` ends one that has nothing to do."""
        left = work_left(self._stages, self._buffers)
        done = {pool for pool in self._pools if left[pool].is_done}
        nodes = self._nodes()
        found = frozenset(node.id for node in nodes)
        if found != self._placed_on or done != self._done:
            self._place(nodes, found, done)
            self._placed_on, self._done = found, done
        self._note_starts(now)
        for pool in self._pools:
            self._withdraw(pool, left[pool], end)
            for index in self._grow(pool, left[pool]):
                start(pool, index)
        self._shrink(now, left, end)

    # Places on nodes that are there

    def _place(self, nodes: Sequence[Node], ids: frozenset[str], done: set[PoolRun]) -> None:
        """Share out the room on the nodes anew, beside the workers that run there. Pools that are done get none."""
        growing: list[Growing] = []
        for pool in self._pools:
            pool.places = {worker.index: worker.node for worker in pool.own_workers() if worker.node in ids}
            growing.append(Growing(_needs(pool), list(pool.places.values()), 0 if pool in done else pool.plan.most))
        limits = self._config.accelerators, self._config.cpu_workers
        for pool, places in zip(self._pools, more_places(growing, nodes, *limits), strict=True):
            for worker in pool.own_workers():
                if not worker.node:  # it waits for a place
                    pool.places[worker.index] = places.pop(0) if places else ""
            if not (pool.places or places or pool in done):
                places.append("")  # for a node to come: otherwise its steps would never run
            unused = pool.unused_indexes()
            for place in places:
                pool.places[next(unused)] = place
        self._widen_queues()
        sizes = ", ".join(f"{pool.plan.name} {len(pool.places)}" for pool in self._pools)
        _LOGGER.info("%d nodes have room for these numbers of workers: %s", len(nodes), sizes)

    def _widen_queues(self) -> None:
        """Let as much wait between stages as the workers need that there are now."""
        workers = sum(len(pool.places) + pool.plan.borrowed for pool in self._pools)
        limit = queue_limit(self._memory_limit, len(self._buffers), workers)
        for buffer in self._buffers.values():
            buffer.limit = max(buffer.limit, limit)

    # Workers on nodes to come

    def _note_starts(self, now: float) -> None:
        """Measure how long workers on nodes to come take to start."""
        for pool in self._pools:
            for worker in pool.workers.values():
                if worker.is_to_come and worker.is_connected:
                    worker.is_to_come = False
                    self._starts[pool] = min(now - worker.asked_at, _LONGEST_START_S)
                    if worker.index in pool.places:
                        pool.places[worker.index] = worker.node

    def _start_s(self, pool: PoolRun) -> float:
        """Return how long a worker on a node to come takes to start, of this pool or else of another one."""
        return self._starts.get(pool, max(self._starts.values(), default=rule.USUAL_START_S))

    def _grow(self, pool: PoolRun, left: WorkLeft) -> list[int]:
        """Return the indexes of new workers, on nodes to come: as many as the rule wants, all at once.

        A pool with a free worker needs none: then something else keeps its work waiting, such as a slow source.
        """
        own = pool.own_workers()
        least = 0 if left.is_done else pool.plan.least
        limits = rule.Limits(least, max(least, len(pool.places), self._most(pool)))
        pool.wanted = rule.wanted(left.seconds, self._start_s(pool), limits)
        missing = pool.wanted - max(len(own), len(pool.places))
        is_full = left.has_waiting and not pool.free_slots() and any(worker.is_connected for worker in own)
        if missing <= 0 or not (is_full or len(own) < least):
            return []
        unused = pool.unused_indexes()
        found = [next(unused) for _ in range(missing)]
        pool.places.update(dict.fromkeys(found, ""))
        self._widen_queues()
        _LOGGER.info(
            "pool %r asks for %d more workers beside its %d: it has %.0f s of work for one, and one starts in %.0f s",
            pool.plan.name,
            missing,
            len(own),
            left.seconds,
            self._start_s(pool),
        )
        return found

    def _most(self, pool: PoolRun) -> int:
        """Return how many workers the options let a pool have, also on nodes to come; 0 if they don't say."""
        needs, most = _needs(pool), pool.plan.most
        limit = self._config.accelerators if needs.gpus else self._config.cpu_workers
        if limit is None:
            return most or 0
        same = [other for other in self._pools if bool(_needs(other).gpus) == bool(needs.gpus) and other is not pool]
        left = limit - sum(max(1, _needs(other).gpus) * len(other.places) for other in same)
        allowed = max(0, left) // max(1, needs.gpus)
        return allowed if most is None else min(most, allowed)

    def _withdraw(self, pool: PoolRun, left: WorkLeft, end: Callable[[Worker], None]) -> None:
        """Ask no longer for workers on nodes to come, once they would come too late."""
        own = pool.own_workers()
        waiting = [worker for worker in own if worker.is_to_come and not worker.node]
        up = len(own) - len(waiting)
        if not waiting or not (left.is_done or rule.comes_too_late(left.seconds, up, self._start_s(pool))):
            return
        least = 0 if left.is_done else max(pool.plan.least, 0 if up else 1)
        for worker in waiting[max(0, least - up) :]:
            pool.places.pop(worker.index, None)
            end(worker)

    # Workers without work

    def _shrink(self, now: float, left: Mapping[PoolRun, WorkLeft], end: Callable[[Worker], None]) -> None:
        """End workers that have had nothing to do for too long, accelerators first."""
        workers = {worker.id: worker for pool in self._pools for worker in pool.workers.values()}
        idle = [worker for worker in workers.values() if self._has_been_idle(worker, now)]
        self._idle_since = {key: value for key, value in self._idle_since.items() if key in workers}
        spare = {
            pool.plan.name: len(pool.own_workers()) - (0 if left[pool].is_done else max(1, pool.plan.least))
            for pool in self._pools
        }
        on_node = Counter(worker.node for worker in workers.values())
        candidates = [
            rule.Idle(each.id, each.pool.plan.name, each.node, bool(each.pool.plan.device_groups))
            for each in idle
            if not each.is_borrowed
        ]
        ending = {*rule.to_end(candidates, spare, on_node), *(each.id for each in idle if each.is_borrowed)}
        for worker in idle:
            if worker.id in ending:
                _LOGGER.info("worker %s of pool %r ends: it has nothing to do", worker.id, worker.pool.plan.name)
                end(worker)

    def _has_been_idle(self, worker: Worker, now: float) -> bool:
        """Return whether a worker has run no bundle for too long."""
        if not worker.is_connected or worker.is_leaving or worker.has_exited or worker.bundles:
            self._idle_since.pop(worker.id, None)
            return False
        busy = worker.pool.worker_busy[worker.index].seconds
        since, before = self._idle_since.setdefault(worker.id, (now, busy))
        if busy != before:
            self._idle_since[worker.id] = now, busy
            return False
        return now - since >= self._config.idle_timeout


def _needs(pool: PoolRun) -> LeaseNeeds:
    assert pool.plan.lease is not None  # it is on a cluster
    return pool.plan.lease
