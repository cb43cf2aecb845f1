"""Starts bundles: which stages may start one, in which order, and in which workers. Starts workers for them, too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from luminosity._shared.text import LOST_WITH_FORK_SERVER, LOST_WITH_NODE, describe_exit
from luminosity.engine.fnapi.connection import Callbacks
from luminosity.engine.loop import splits, transfers
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.stage_input import StageInput
from luminosity.engine.loop.workers import Connected, Exited, Message, PoolRun, Responded, Sent, Worker
from luminosity.engine.workers.request import WorkerRequest
from luminosity.errors import WorkerStartFailed

__all__ = ["Dispatch", "Staff", "rank"]

_MAX_FAILED_STARTS = 3  # in a row, before the run fails: one may be chance
_HOPEFUL_S = 60.0  # how long a cluster may have no worker that is ready before failed starts end the run
_MAX_FAILED_ON_NODES = 10  # the same on a cluster, where processes are lost more often, and start at the same time
_ON_NODES_AHEAD = 2  # workers of each CPU pool that a cluster is asked for before there is work for them
_SATURATED_S = 0.03  # a pool needs one more CPU worker if all its slots were taken for this long
_SECOND_S = 0.1  # its second one after this long: it takes as long to start, and short runs have ended by then
_SHORT_S = 0.1  # work that takes less is done before one more worker has started
_NOT_SHORT_S = 0.25  # after this long, work that seemed to be short is not
_BORROW_S = 0.25  # and one on another pool's idle core after this long: that pool may need it itself by then
_CONNECT_TIMEOUT_S = 60.0  # imports in a worker may be slow; a worker that takes longer hangs
# The threads that feed a device need little time, but at once: the device stands still while they wait for a core.
_GIVES_WAY = 10  # the niceness of CPU workers beside workers with devices
_MOST_PATIENT_S = 0.5  # a stage of a stream that has waited for a worker for this long gets the next one


class Staff:
    """All workers whose process has not exited, and how long pools have lacked one more.

    Only the loop's thread uses it. What a worker sends and that it has exited is passed to ``post`` by other threads.
    Starting a worker blocks until its process exists.
    """

    def __init__(self, parts: RunParts, post: Callable[[Message], None]) -> None:
        self._parts = parts
        self._post = post
        self._saturated_since: dict[PoolRun, float] = {}
        self.workers: dict[str, Worker] = {}  # by id, in the order in which they started

    # Starts

    def start_ahead(self) -> None:
        """Start the workers of devices, and one of each pool for models, before the first element arrives.

        All of them will be needed, and their models take long to load. On a cluster, each pool begins with two workers,
        or with ``--min_workers``, since the first worker of a node takes seconds to start.
        """
        for pool in self._parts.pools:
            ahead = int(bool(pool.load_ahead))
            if pool.plan.lease is not None:
                ahead = max(_ON_NODES_AHEAD, pool.plan.least)
            if pool.plan.device_groups:
                ahead = len(pool.places)
            for index in list(pool.places)[:ahead]:
                self.start(pool, index)

    def want_worker(
        self, pool: PoolRun, now: float, work: int, *, is_short: bool = False, may_borrow: bool = True
    ) -> None:
        """Start one more worker if the pool allows it, has been saturated for long enough, and has ``work`` for it.

        ``is_short`` says that the workers that the pool has will most likely be done before one more has started.
        """
        waited = now - self.note_saturated(pool, now)
        is_needed = not pool.workers or pool.plan.device_groups or waited > _patience(pool, is_short=is_short)
        index = pool.unused_index()
        if index is None and may_borrow and waited > _BORROW_S and pool.may_borrow():
            index = pool.unused_borrowed_index()
        if index is not None and is_needed and pool.starting() < max(1, work):
            self._saturated_since[pool] = now
            self.start(pool, index)

    def note_saturated(self, pool: PoolRun, now: float) -> float:
        """Note that a pool has no free slot for work that it could do now. Returns since when that is so."""
        return self._saturated_since.setdefault(pool, now)

    def keep_saturated(self, saturated: set[PoolRun]) -> None:
        """Forget since when all pools but the ``saturated`` ones were so."""
        for pool in self._saturated_since.keys() - saturated:
            del self._saturated_since[pool]

    def next_start(self, now: float) -> float:
        """Return when a pool that is saturated will have been so for long enough to need a worker."""
        starts = (
            since + patience
            for pool, since in self._saturated_since.items()
            for patience in (_patience(pool, is_short=False), _NOT_SHORT_S)
        )
        return min((start for start in starts if start > now), default=float("inf"))

    def start(self, pool: PoolRun, index: int) -> None:
        """Start a worker of a pool. On a cluster, this asks for its place and does not wait for it."""
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
            worker.process = self._parts.launcher.start(
                self._request(worker), lambda code: self._post(Exited(worker, code))
            )
        except WorkerStartFailed:
            self.workers.pop(worker.id, None)  # it has no process, so no exit will be reported
            raise

    def _request(self, worker: Worker) -> WorkerRequest:
        pool, folders, environment = worker.pool, self._parts.folders, worker.pool.plan.python
        return WorkerRequest(
            worker_id=worker.id,
            url=folders.url,
            environment=pool.environment(worker.index),
            arguments=list(sys.argv),
            working_directory=os.getcwd(),
            import_path=list(sys.path if environment is None else environment.import_path),
            python="" if environment is None else environment.python,
            memory_folder=folders.memory,
            spill_folder=folders.spill,
            quota=folders.quota,
            writer=worker.writer,
            main_classes=folders.main_classes,
            private_folders=folders.all,
            load_ahead=pool.load_ahead,
            is_stream=pool.is_stream,
            niceness=_GIVES_WAY if not pool.plan.device_groups and self._have_devices() else 0,
            prints=self._parts.prints,
            pipeline_options=self._parts.config.worker_options,
            lease=pool.lease_needs(worker.index),
        )

    def _have_devices(self) -> bool:
        return any(pool.plan.device_groups for pool in self._parts.pools)

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
        worker.pool.with_free_streams.pop(worker.index, None)
        self._parts.server.disconnect(worker.id)

    def check_start(self, worker: Worker, code: int) -> None:
        """Raise ``WorkerStartFailed`` if a worker has exited before it was ready, as too many before it did."""
        if worker.is_connected or code in (LOST_WITH_NODE, LOST_WITH_FORK_SERVER):
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


def _patience(pool: PoolRun, *, is_short: bool) -> float:
    """Return how long a pool must have been saturated before it gets one more worker."""
    if is_short:
        return _NOT_SHORT_S
    return _SECOND_S if len(pool.workers) == 1 and pool.plan.lease is None else _SATURATED_S


def rank(latest_first: Sequence[StageRun], waiting_since: Mapping[str, float], now: float) -> list[StageRun]:
    """Return the order in which stages get workers.

    Last stages come first: elements near the end of the pipeline free the most memory. But a stage's very first bundle
    is small and never waits, since its output may be a side input that other stages wait for. In a stream, later stages
    may have work all the time, such as timers that set themselves again. So a stage that has waited for long goes
    before them: without its source, a stream has no watermark, and no window of such timers ever ends. The same holds
    for a stage with bounded input beside a stream, which may meet the stream in a Flatten or as a side input.
    """
    if not any(stage.plan.has_endless_input for stage in latest_first):
        return sorted(latest_first, key=lambda stage: stage.has_begun)

    def place(stage: StageRun) -> tuple[bool, bool]:
        since = waiting_since.get(stage.id)
        has_waited = since is not None and now - since > _MOST_PATIENT_S
        return not has_waited, stage.has_begun

    return sorted(latest_first, key=place)


class Dispatch:
    """Starts bundles while there are input and free slots, and asks for more workers, on the loop's thread."""

    def __init__(self, parts: RunParts, staff: Staff) -> None:
        self._parts = parts
        self._staff = staff
        self._latest_first = parts.all_stages()[::-1]
        self._waiting_since: dict[str, float] = {}  # by the id of a stage that has input but no worker
        self._saturated: set[PoolRun] = set()  # without a free slot, as found in this round
        self._wanted_idle: set[int] = set()  # and of those in which a suspect bundle waits for an idle worker

    def start_bundles(self, now: float, wall_micros: int) -> None:
        """Start all bundles that can start now, then let idle workers take from those that run."""
        self._saturated.clear()
        self._wanted_idle.clear()
        for stage in rank(self._latest_first, self._waiting_since, now):
            if self._is_eligible(stage, now, wall_micros):
                self._start(stage, now, wall_micros)
        for pool in self._parts.pools:
            if pool.has_free_slot():
                splits.take_work(pool, now, self._is_held_back)
            elif pool.workers and pool.may_grow():
                if work := splits.work_to_take(pool, now, _SHORT_S):
                    self._want_worker(pool, now, work)
                elif splits.may_give_work(pool, now):
                    self._saturated.add(pool)
                    self._staff.note_saturated(pool, now)
        self._staff.keep_saturated(self._saturated)

    def _is_eligible(self, stage: StageRun, now: float, wall_micros: int) -> bool:
        """Return whether a stage has work that it may start. A TestStream sends nothing for which a sink could wait."""
        stage.wake_delayed(now)
        if not stage.is_ready or not stage.has_work(wall_micros):
            return False
        if self._parts.test_streams is None and stage.is_gathering(now):
            return False
        return not (stage.is_source and id(stage.pool) in self._wanted_idle)

    def _start(self, stage: StageRun, now: float, wall_micros: int) -> None:
        """Start bundles of a stage until its input, the free slots or the room for its output end."""
        outflow = self._parts.outflows[stage.id]
        free: int | None = None  # slots of the pool; counted once if that is possible
        while stage.has_work(wall_micros) and not outflow.is_held_back():
            worker = self._free_worker(stage, now)
            if worker is None:
                return
            free = stage.pool.free_slots() if free is None else free
            taken = stage.next_bundle(worker, now, wall_micros, outflow.most_elements(max(1, free)))
            if taken is None:
                if stage.is_source:
                    splits.hasten(stage)  # in the worker to which a restriction returns
                return
            bundle, worker = taken
            # Bundles that start one after the other also end so: not all at once, at a common deadline.
            transfers.start(bundle, worker, self._parts, self._parts.clock.monotonic())
            # A suspect bundle takes all slots of its worker, and a core that is lent makes others unusable.
            free = None if bundle.is_suspect or stage.pool.plan.borrowed else free - 1

    def _free_worker(self, stage: StageRun, now: float) -> Worker | None:
        """Return a worker for the stage's next bundle. If there is none, let one become free or start."""
        pool, is_suspect = stage.pool, stage.next_is_suspect()
        worker = pool.free_worker(stage.id, stage.max_active_bundles, is_idle=is_suspect, is_source=stage.is_source)
        if worker is not None:
            self._waiting_since.pop(stage.id, None)
            return worker
        if stage.is_source:
            splits.hasten(stage)
        if is_suspect:
            self._wanted_idle.add(id(pool))
        self._waiting_since.setdefault(stage.id, now)
        is_short = not stage.is_source and stage.is_short(_SHORT_S)
        self._want_worker(pool, now, stage.queued, is_short=is_short, may_borrow=not stage.is_source)
        return None

    def _want_worker(
        self, pool: PoolRun, now: float, work: int, *, is_short: bool = False, may_borrow: bool = True
    ) -> None:
        self._saturated.add(pool)
        self._staff.want_worker(pool, now, work, is_short=is_short, may_borrow=may_borrow)

    def _is_held_back(self, stage: StageInput) -> bool:
        return self._parts.outflows[stage.id].is_held_back()
