"""The workers of a run: starts one more where a pool needs it, and notes which of them have exited."""

from __future__ import annotations

from collections.abc import Callable

from luminosity._shared.text import LOST_WITH_NODE, describe_exit
from luminosity.engine.fnapi.connection import Callbacks
from luminosity.engine.loop import workers
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.workers import Connected, Exited, Message, PoolRun, Responded, Sent, Worker
from luminosity.errors import WorkerStartFailed

__all__ = ["Staff"]

_MAX_FAILED_STARTS = 3  # in a row, before the run fails: one may be chance
_HOPEFUL_S = 60.0  # how long a cluster may have no worker that is ready before failed starts end the run
_MAX_FAILED_ON_NODES = 10  # the same on a cluster, where processes are lost more often, and start at the same time
_ON_NODES_AHEAD = 2  # workers of each CPU pool that a cluster is asked for before there is work for them
_SATURATED_S = 0.03  # a pool needs one more CPU worker if all its slots were taken for this long
_BORROW_S = 0.25  # and one on another pool's idle core after this long: that pool may need it itself by then
_CONNECT_TIMEOUT_S = 60.0  # imports in a worker may be slow; a worker that takes longer hangs


class Staff:
    """All workers whose process has not exited, and how long pools have lacked one more.

    Only the loop's thread uses it. What a worker sends and that it has exited is passed to ``post`` by other threads.
    Starting a worker blocks until its process exists.
    """

    def __init__(self, parts: RunParts, post: Callable[[Message], None]) -> None:
        self._parts = parts
        self._post = post
        self._saturated_since: dict[int, float] = {}  # by id(pool)
        self.workers: dict[str, Worker] = {}  # by id, in the order in which they started

    # Starts

    def start_ahead(self) -> None:
        """Start the workers of devices, and one of each pool for models, before the first element arrives.

        All of them will be needed, and their models take long to load. On a cluster, each pool begins with two workers,
        since the first worker of a node takes seconds to start.
        """
        for pool in self._parts.pools:
            ahead = (
                min(_ON_NODES_AHEAD, pool.plan.workers) if pool.plan.lease is not None else int(bool(pool.load_ahead))
            )
            for index in range(len(pool.plan.device_groups) or ahead):
                self._start(pool, index)

    def want_worker(self, pool: PoolRun, now: float, work: int, *, may_borrow: bool = True) -> None:
        """Start one more worker if the pool allows it, has been saturated for long enough, and has ``work`` for it."""
        waiting_since = self._saturated_since.setdefault(id(pool), now)
        is_needed = not pool.workers or pool.plan.device_groups or now - waiting_since > _SATURATED_S
        index = pool.unused_index()
        if index is None and may_borrow and now - waiting_since > _BORROW_S and pool.may_borrow():
            index = pool.unused_borrowed_index()
        if index is not None and is_needed and pool.starting() < max(1, work):
            self._saturated_since[id(pool)] = now
            self._start(pool, index)

    def keep_saturated(self, saturated: set[int]) -> None:
        """Forget since when those pools were saturated that no longer are: ``saturated`` has the ids of the others."""
        for pool_id in set(self._saturated_since) - saturated:
            del self._saturated_since[pool_id]

    def next_start(self, now: float) -> float:
        """Return when a pool that is saturated will have been so for long enough to need a worker."""
        starts = (since + _SATURATED_S for since in self._saturated_since.values())
        return min((start for start in starts if start > now), default=float("inf"))

    def _start(self, pool: PoolRun, index: int) -> None:
        worker = Worker(pool, index)
        callbacks = Callbacks(
            on_connected=lambda: self._post(Connected(worker)),
            on_response=lambda response: self._post(Responded(worker, response)),
            on_elements=lambda elements: self._post(Sent(worker, elements)),
        )
        worker.connection = self._parts.server.connect(worker.id, callbacks)
        pool.workers[index] = worker
        self.workers[worker.id] = worker
        try:
            workers.start(
                worker,
                self._parts.launcher,
                self._parts.folders,
                self._parts.config,
                self._parts.prints,
                lambda worker, code: self._post(Exited(worker, code)),
            )
        except WorkerStartFailed:
            self.workers.pop(worker.id, None)  # it has no process, so no exit will be reported
            raise

    def kill_if_late(self, worker: Worker, now: float) -> None:
        """Kill a worker that has not connected in time. Its exit counts as a failed start."""
        if worker.is_connected or worker.process is None:
            return
        if worker.process.waits_for():
            worker.created_at = now  # a cluster may take as long as it likes to find a place for it
        elif now - worker.created_at > _CONNECT_TIMEOUT_S:
            worker.kill()

    # Exits

    def note_exit(self, worker: Worker) -> None:
        """Note that the process of a worker has exited. Its place in the pool is free then."""
        self.workers.pop(worker.id, None)
        worker.pool.connected -= worker.is_connected and not worker.has_exited
        worker.has_exited = True
        worker.pool.workers.pop(worker.index, None)
        self._parts.server.disconnect(worker.id)

    def check_start(self, worker: Worker, code: int) -> None:
        """Raise ``WorkerStartFailed`` if a worker has exited before it was ready, as too many before it did."""
        if worker.is_connected or code == LOST_WITH_NODE:
            return
        pool = worker.pool
        pool.failed_starts += 1
        most = _MAX_FAILED_STARTS if pool.plan.lease is None else _MAX_FAILED_ON_NODES
        # A cluster may lose starting workers for a while, and go on with those that it has.
        is_hopeful = pool.plan.lease is not None and (
            pool.connected or pool.clock.monotonic() - pool.ready_at < _HOPEFUL_S
        )
        if pool.failed_starts >= most and not is_hopeful:
            raise WorkerStartFailed(
                f"a worker of pool {pool.plan.name!r} {describe_exit(code)} before it was ready, "
                f"{pool.failed_starts} times in a row",
                fix="read what the workers printed above",
            )
