"""Starts bundles: which stages may start one, in which order, and in which workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from luminosity.engine.loop import idle_workers, splits, transfers
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.staff import Staff
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.stage_input import StageInput
from luminosity.engine.loop.workers import PoolRun, Worker

__all__ = ["Dispatch", "rank"]

_MOST_PATIENT_S = 0.5  # a stage of a stream that has waited for a worker for this long gets the next one


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
        self._latest_first = parts.stages[::-1]
        self._waiting_since: dict[str, float] = {}  # by the id of a stage that has input but no worker
        self._saturated: set[int] = set()  # ids of pools without a free slot, as found in this round
        self._wanted_idle: set[int] = set()  # and of those in which a suspect bundle waits for an idle worker

    def start_bundles(self, now: float, wall_micros: int) -> None:
        """Start all bundles that can start now, then let idle workers take from those that run."""
        self._saturated.clear()
        self._wanted_idle.clear()
        for stage in rank(self._latest_first, self._waiting_since, now):
            if self._is_eligible(stage, now, wall_micros):
                self._start(stage, now, wall_micros)
        for pool in self._parts.pools:
            if pool.free_slots():
                idle_workers.take_work(pool, now, self._is_held_back)
            elif pool.workers and pool.may_grow() and (work := idle_workers.work_to_take(pool, now)):
                self._want_worker(pool, now, work)
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
        self._want_worker(pool, now, stage.queued, may_borrow=not stage.is_source)
        return None

    def _want_worker(self, pool: PoolRun, now: float, work: int, *, may_borrow: bool = True) -> None:
        self._saturated.add(id(pool))
        self._staff.want_worker(pool, now, work, may_borrow=may_borrow)

    def _is_held_back(self, stage: StageInput) -> bool:
        return self._parts.outflows[stage.id].is_held_back()
