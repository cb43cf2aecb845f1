"""Worker processes and pools as the loop sees them, and the messages that reach the loop."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.core import THREAD_VARIABLES
from luminosity.engine.data.world import Clock
from luminosity.engine.fnapi.connection import WorkerConnection
from luminosity.engine.loop.bundle import Attempt, Bundle, Deadlines, Overdue
from luminosity.engine.loop.metrics import BusyTime
from luminosity.engine.resources.machine import LeaseNeeds, visibility
from luminosity.engine.resources.pools import SOURCE_SLOTS, Pool
from luminosity.engine.workers.launcher import Process

__all__ = [
    "CancelRequested",
    "CheckpointWritten",
    "Connected",
    "EventSent",
    "Exited",
    "Message",
    "PoolRun",
    "Responded",
    "Sent",
    "Worker",
]

_numbers = itertools.count(1)
_MANY_WORKERS = 16  # that are free: any of them will do, since the best is not worth a look at each


class Worker:
    """One worker process. Each of its slots runs one bundle at a time.

    Only the loop's thread uses it. The loop closes ``connection`` when the process has exited.
    """

    def __init__(self, pool: PoolRun, index: int) -> None:
        self.id = f"w{next(_numbers)}"
        self.pool = pool
        self.index = index
        self.is_borrowed = pool.is_borrowed(index)  # it runs on the core of another pool
        self.writer = pool.writer(index)  # its number among all processes that write blocks: see spill/quota.py
        self.created_at = self.asked_at = pool.clock.monotonic()
        self.is_to_come = pool.has_no_node(index)
        self.is_connected = False
        self.is_leaving = False  # its machine will be gone soon: it gets no more bundles
        self.is_stopping = False
        self.end_by = float("inf")  # when it is killed if it has not ended, once it is stopping
        self.has_exited = False
        self.overdue: Overdue | None = None  # why it is ended, if an element took too long
        self.process: Process | None = None
        self.connection: WorkerConnection | None = None
        self.bundles: dict[str, Bundle] = {}  # those that run here, by instruction id
        self.warm_stages: set[str] = set()  # ids of stages that have run here before
        # What its committed bundles have reported. On this machine its process is looked at instead.
        self.cpu_seconds = 0.0
        self.resident = 0
        self.pid = 0
        self._free_streams = [f"{slot}" for slot in range(pool.plan.slots)]
        self._free_source_streams = [f"source{slot}" for slot in range(SOURCE_SLOTS)]
        pool.with_free_streams[index] = self

    def has_connected(self) -> None:
        """Note that the process has connected. The message may come after the one that it has exited."""
        if not self.is_connected and not self.has_exited:
            self.pool.connected += 1
        self.is_connected = True

    def free_slots(self, *, is_source: bool = False) -> int:
        """Return how many more bundles can run here now. A suspect bundle takes all slots.

        Bundles of sources have slots of their own, since they may wait for records. A worker on a borrowed core has
        none: the rest of a restriction returns to its worker, and would wait there until the core is idle again.
        """
        if not self.is_connected or self.is_leaving or self.is_stopping or self.has_exited:
            return 0
        if self.bundles and any(b.is_suspect for b in self.bundles.values()):
            return 0
        if self.index not in self.pool.places and not self.bundles and not self.pool.may_borrow():
            return 0
        if is_source:
            return 0 if self.is_borrowed else len(self._free_source_streams)
        return len(self._free_streams)

    def is_working(self) -> bool:
        """Return whether a bundle runs. Those of sources don't count: they mostly wait."""
        return any(not bundle.stage.is_source for bundle in self.bundles.values())

    def running(self, stage_id: str) -> int:
        """Return how many bundles of a stage run here."""
        return sum(bundle.stage.id == stage_id for bundle in self.bundles.values())

    def occupy(self, bundle: Bundle, instruction_id: str) -> str:
        """Take a slot for a bundle. Returns the id of the slot's data stream."""
        self.bundles[instruction_id] = bundle
        self.pool.with_bundles[self.index] = self
        for busy in self._busy_times(bundle):
            busy.begin()
        stream_id = self._free_streams_of(bundle).pop()
        if not self._free_streams:
            self.pool.with_free_streams.pop(self.index, None)
        return stream_id

    def vacate(self, attempt: Attempt) -> None:
        """Free the slot of an attempt that has ended."""
        bundle = self.bundles.pop(attempt.instruction_id)
        self._note_idle()
        for busy in self._busy_times(bundle):
            busy.end()
        self._free_streams_of(bundle).append(attempt.stream_id)
        if self._free_streams and not self.has_exited:
            self.pool.with_free_streams[self.index] = self

    def _free_streams_of(self, bundle: Bundle) -> list[str]:
        return self._free_source_streams if bundle.stage.is_source else self._free_streams

    def take_bundles(self) -> list[Bundle]:
        """Remove and return the bundles that ran here. Output of theirs that still arrives is ignored."""
        lost = list(self.bundles.values())
        self.bundles.clear()
        self._note_idle()
        for bundle in lost:
            for busy in self._busy_times(bundle):
                busy.end()
        return lost

    def _note_idle(self) -> None:
        if not self.bundles and self.pool.with_bundles.get(self.index) is self:
            del self.pool.with_bundles[self.index]

    def _busy_times(self, bundle: Bundle) -> tuple[BusyTime, ...]:
        if bundle.stage.is_source:
            return (bundle.stage.busy,)  # it mostly waits
        return bundle.stage.busy, self.pool.worker_busy[self.index]

    def is_up(self) -> bool:
        """Return whether it is one of its pool's own workers, up or to come, and stays for now."""
        return not (self.is_borrowed or self.is_leaving or self.is_stopping or self.has_exited)

    def instruct(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        """Send an instruction. Does not wait for the response."""
        assert self.connection is not None
        self.connection.instruct(request)

    def cause(self, instruction_id: str) -> BaseException | None:
        """Return the exception that failed the instruction, if it was raised in this process."""
        return self.connection.cause(instruction_id) if self.connection is not None else None

    @property
    def node(self) -> str:
        """The id of its node; empty on one machine."""
        return self.process.node() if self.process is not None else ""

    def kill(self) -> None:
        """Kill the process. Its exit is reported as a message."""
        if self.process is not None:
            self.process.kill()


class PoolRun:
    """A pool while a run lasts: its workers, which start as there is work for them.

    ``plan`` is what was assigned: how many workers with which resources. ``places`` are those that the pool may have
    now; on a cluster, their number changes while the run lasts.
    """

    def __init__(self, plan: Pool, first_writer: int, clock: Clock) -> None:
        self.plan = plan
        self.clock = clock
        self.first_writer = first_writer
        self.cpu_pools: list[PoolRun] = []  # all CPU pools of the run, which lend each other idle cores
        self.workers: dict[int, Worker] = {}  # by index; a lost worker is replaced at its index
        # Those that may have a free slot, by index. With hundreds of workers, most are busy, and need no look.
        self.with_free_streams: dict[int, Worker] = {}
        self.with_bundles: dict[int, Worker] = {}  # those that run some, by index: of many idle ones, none needs a look
        self.deadlines = Deadlines()  # of the bundles that run in its workers
        self.connected = 0  # workers
        self.failed_starts = 0  # in a row
        self.ready_at = clock.monotonic()  # when a worker was ready last, or the run began
        self.load_ahead = ""  # a file for its workers: see workers/worker_files.py
        self.is_stream = False  # whether one of its stages has input that may never end
        # By the index of a worker: the node with room for it. Empty on one machine, and if the node is still to come.
        self.places = {index: "".join(plan.nodes[index : index + 1]) for index in range(plan.workers)}
        self.worker_busy = [BusyTime(clock) for _ in range(plan.workers + plan.borrowed)]
        self.wanted = plan.workers  # workers, by the rule in elastic/rule.py
        self._most = 0  # workers at once, so far

    def free_slots(self) -> int:
        """Return how many more bundles the connected workers can run now."""
        return sum(worker.free_slots() for worker in self.with_free_streams.values())

    def has_free_slot(self) -> bool:
        """Return whether the connected workers can run one more bundle now. Quicker than to count if many can."""
        return any(worker.free_slots() for worker in self.with_free_streams.values())

    def free_worker(
        self, stage_id: str, max_active_bundles: int, *, is_idle: bool, is_source: bool = False
    ) -> Worker | None:
        """Return the worker with the most free slots that may run a bundle of the stage, or None if there is none.

        Of equal ones, the first that has run the stage before: its functions are set up there, and what it keeps in
        the process, such as the key of ``BatchElements`` in a stream, stays one.
        """
        if self.plan.slots == 1 and not is_source and len(self.with_free_streams) > _MANY_WORKERS:
            free = (w for w in self.with_free_streams.values() if not w.is_borrowed and w.free_slots())
            if (first := next((worker for worker in free if not worker.bundles), None)) is not None:
                return first
        has_many_slots = self.plan.slots > 1 or is_source
        return max(
            self.free_workers(stage_id, max_active_bundles, is_idle=is_idle, is_source=is_source),
            key=lambda worker: (
                worker.free_slots(is_source=is_source) if has_many_slots else 1,
                not worker.is_borrowed,
                stage_id in worker.warm_stages,
                -worker.index,
            ),
            default=None,
        )

    def free_workers(
        self, stage_id: str, max_active_bundles: int, *, is_idle: bool, is_source: bool = False
    ) -> list[Worker]:
        """Return the workers that may run a bundle of the stage, whose slot is one for sources if ``is_source``.

        No worker runs more than ``max_active_bundles`` of the stage. If ``is_idle``, it must run no bundle at all.
        """
        return [
            worker
            for worker in (self.workers if is_source else self.with_free_streams).values()
            if worker.free_slots(is_source=is_source)
            and (not worker.bundles or (worker.running(stage_id) < max_active_bundles and not is_idle))
        ]

    def connected_slots(self) -> int:
        """Return the number of slots of the workers that have started, whether they are free or not."""
        return self.connected * self.plan.slots

    def all_slots(self) -> int:
        """Return the number of slots once all workers have started."""
        return len(self.places) * self.plan.slots

    def most_workers(self) -> int:
        """Return the most workers that the pool had places for at once, and of those on borrowed cores that started."""
        self._most = max(self._most, len(self.places), len(self.workers))
        return self._most

    def own_workers(self) -> list[Worker]:
        """Return its workers that stay for now, without those on borrowed cores."""
        return [worker for worker in self.workers.values() if worker.is_up()]

    def starting(self) -> int:
        """Return the number of workers that have not connected yet."""
        return sum(not worker.is_connected for worker in self.workers.values())

    def unused_index(self) -> int | None:
        """Return the first index without a worker, or None if the pool is full."""
        if not self.may_grow():
            return None  # without a look at each of hundreds: the loop asks all the time
        return next((i for i in self.places if i not in self.workers), None)

    def may_grow(self) -> bool:
        """Return whether one more worker could start, on a core of its own or a borrowed one."""
        return len(self.workers) < len(self.places) + self.plan.borrowed

    def unused_indexes(self) -> Iterator[int]:
        """Yield the indexes of workers that could have new places, without those on borrowed cores. Never ends."""
        for index in itertools.count():
            if index >= len(self.worker_busy):
                self.worker_busy.append(BusyTime(self.clock))
            if not (self.is_borrowed(index) or index in self.workers or index in self.places):
                yield index

    def is_borrowed(self, index: int) -> bool:
        """Return whether the worker at ``index`` runs on the core of another pool."""
        return self.plan.workers <= index < self.plan.workers + self.plan.borrowed

    def has_no_node(self, index: int) -> bool:
        """Return whether a cluster has no node yet for the worker at ``index``."""
        return self.plan.lease is not None and not (self.is_borrowed(index) or self.places.get(index))

    def writer(self, index: int) -> int:
        """Return the number of the worker at ``index`` among all processes that write blocks.

        Those that a cluster's pool gets while the run lasts share one: on a cluster, nothing is counted by it.
        """
        return self.first_writer + (index if index < self.plan.workers + self.plan.borrowed else 0)

    def may_borrow(self) -> bool:
        """Return whether cores of other CPU pools are idle that one more worker of this pool could use."""
        if not self.plan.borrowed:
            return False
        cores = sum(len(pool.places) * pool.plan.cores_per_worker for pool in self.cpu_pools)
        busy = sum(
            bool(worker.is_working() or not worker.is_connected) * pool.plan.cores_per_worker
            for pool in self.cpu_pools
            for worker in pool.workers.values()
        )
        return busy + self.plan.cores_per_worker <= cores + 1e-6  # shares may be fractions

    def unused_borrowed_index(self) -> int | None:
        """Return the first index of a borrowed worker that has not started, or None if all have."""
        borrowed = range(self.plan.workers, self.plan.workers + self.plan.borrowed)
        return next((i for i in borrowed if i not in self.workers), None)

    def lease_needs(self, index: int) -> LeaseNeeds | None:
        """Return what the worker at ``index`` asks a cluster for. On a borrowed core it asks for no core of its own."""
        needs = self.plan.lease
        if needs is None:
            return None
        if self.is_borrowed(index):
            return replace(needs, cpus=0.0, node="".join(self.plan.nodes[index : index + 1]))
        return replace(needs, node=self.places.get(index, ""))

    def environment(self, index: int) -> dict[str, str]:
        """Return ``os.environ`` of the worker at ``index``: this process's variables, its devices and its share."""
        share = self.plan.share(index)
        threads = str(max(1, int(share.cores)))
        own = os.environ if self.plan.python is None else self.plan.python.variables(os.environ)
        return {
            **dict.fromkeys(THREAD_VARIABLES, threads),
            **own,
            # A CPU worker sees no device, so that no step takes one by accident.
            **visibility(share.devices),
            **share.to_environment(),
        }


@dataclass(frozen=True)
class Connected:
    """A worker has connected to the server."""

    worker: Worker


@dataclass(frozen=True)
class Responded:
    """A worker has responded to an instruction."""

    worker: Worker
    response: beam_fn_api_pb2.InstructionResponse


@dataclass(frozen=True)
class Sent:
    """A worker has sent output elements or timers."""

    worker: Worker
    elements: beam_fn_api_pb2.Elements


@dataclass(frozen=True)
class Exited:
    """A worker's process has exited."""

    worker: Worker
    code: int


class CancelRequested:
    """The user has cancelled the run."""


class StopRequested:
    """The user wants the run to stop when its running bundles have ended, and to keep its checkpoint."""


class EventSent:
    """A service has sent an event of a TestStream, or the end of it."""


@dataclass(frozen=True)
class CheckpointWritten:
    """All checkpoints up to ``number`` survive the end of all processes, and those up to ``synced`` a power loss."""

    number: int
    synced: int
    error: Exception | None = None


# What other threads put into the loop's queue.
Message = Connected | Responded | Sent | Exited | CancelRequested | StopRequested | EventSent | CheckpointWritten
