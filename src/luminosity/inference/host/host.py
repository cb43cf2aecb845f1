"""The model host: who waits for which model, and what is done next."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable
from enum import Enum, auto
from typing import Any

from luminosity.inference.handler import Handler
from luminosity.inference.host.device_threads import DeviceThreads
from luminosity.inference.host.in_flight import InFlight
from luminosity.inference.host.lane import Lane, LaneSettings
from luminosity.inference.host.loader import Dropped, drop
from luminosity.inference.host.model import Loaded, LoadStats, Model, State
from luminosity.inference.host.model_scheduler import ModelScheduler
from luminosity.inference.host.session import Session
from luminosity.inference.host.work import Batch

__all__ = ["Ahead", "ModelHost"]

_IDLE_S = 60.0
"""How long a model that nobody uses is kept, and threads that have nothing to do."""
_LOOK_AGAIN_S = 1.0
_TRY_AGAIN_S = 60.0
"""After which a model that could not be loaded ahead of its work may be tried once more."""


class Ahead(Enum):
    """How far a model is that was asked for before there is work for it."""

    LOADING = auto()
    READY = auto()
    FAILED = auto()
    NO_ROOM = auto()


class ModelHost:
    """Gathers from all bundles and threads of this process, and keeps one device busy.

    While the device computes a batch the next one is collated and moved, and the one before is handed back.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, budget: int | None = None, device: str = "cpu"
    ) -> None:
        """``budget``: the bytes that models may take together; None: as many as there are."""
        self.now = clock
        self.changed = threading.Condition()
        """Guards everything here, in the lanes and in the sessions; notified at every change."""
        self.broken: BaseException | None = None
        """What ended one of the threads, so that nobody waits for it in vain."""
        self.roster = ModelScheduler(self, budget, device)
        self.fates = InFlight(self)
        self._lanes: dict[Hashable, Lane] = {}
        self._unused: set[Lane] = set()
        self._crew: DeviceThreads | None = None
        """None while there is nothing to do."""

    def enter(self, key: Hashable, make_handler: Callable[[], Handler[Any, Any, Any]], settings: LaneSettings) -> Lane:
        """The lane of this key, made by whoever comes first; to be left as often as it is entered."""
        with self.changed:
            lane = self._lanes.get(key)
            if lane is None:
                handler = make_handler()
                name = ("lane", key) if settings.model is None else ("model", settings.model)
                model = self.roster.model(name, handler, settings.clock, settings.family)
                model.label = settings.label or model.label
                lane = self._lanes[key] = Lane(key, handler, model, settings)
            lane.users += 1
            self._unused.discard(lane)
            if self._crew is None:
                self._crew = DeviceThreads(self)
            self._crew.grow_to(lane.model.concurrency)
            return lane

    def leave(self, lane: Lane) -> None:
        with self.changed:
            lane.users -= 1
            lane.unused_since = self.now()
            if not lane.users:
                self._unused.add(lane)
            self.wake()

    def open(self, step: Any = None) -> Session:
        return Session(self, step)

    def load(self, lane: Lane) -> None:
        """Wait until the model is here; raises what its load does."""
        model = lane.model
        with self.changed:
            failures = model.failures
            model.waiters += 1
            self.wake()
            try:
                while not model.is_ready:
                    if model.failures > failures:
                        assert model.error is not None
                        raise model.error
                    self._wait(_LOOK_AGAIN_S)
            finally:
                if model.failures == failures:  # Else nobody is counted any more: see Roster.
                    model.waiters -= 1

    def load_ahead(self, lane: Lane, instead_of: Lane | None = None) -> Ahead:
        """Have the model loaded before there is work for it, beside those that work; and tell how far that is.

        Where there is no room beside them it takes the place of another lane's model, and gets what waits for that one.
        """
        model = lane.model
        with self.changed:
            if model.is_ready:
                return Ahead.READY
            if model.state is State.ABSENT:
                if model.error is not None and self.now() - model.failed_at < _TRY_AGAIN_S:
                    return Ahead.FAILED
                if model.does_not_fit_beside:
                    if instead_of is None:
                        return Ahead.NO_ROOM
                    self.roster.succeed(instead_of, lane)
                model.is_awaited = True
                self.wake()
            return Ahead.LOADING

    def take_over(self, old: Lane, new: Lane) -> None:
        """What waits in one lane, and was not yet cut into batches, goes to the other."""
        with self.changed:
            old.move_to(new)
            self.wake()

    def take_load_stats(self, lanes: list[Lane]) -> list[list[LoadStats]]:
        """For each of these lanes."""
        with self.changed:
            return [lane.model.take_load_stats() for lane in lanes]

    def wake(self) -> None:
        self.changed.notify_all()

    def wait_until(self, true: Callable[[], bool], lanes: Collection[Lane]) -> None:
        """Wait under the lock. Bounded by the work itself, and by the lanes' timeouts where they have some."""
        timeouts = [lane.settings.timeout for lane in lanes if lane.settings.timeout is not None]
        look_again = min([_LOOK_AGAIN_S, *(max(timeout / 10, 0.01) for timeout in timeouts)])
        while not true():
            if not self._abandon_overdue():
                self._wait(look_again)

    def _wait(self, seconds: float) -> None:
        if self.broken is not None:
            raise RuntimeError("A thread of the model host has failed.") from self.broken
        self.changed.wait(seconds)

    def check_integrity(self) -> None:
        """What must hold at any time, and more when nothing is under way; raises where it does not."""
        with self.changed:
            self._check_integrity()

    def _check_integrity(self) -> None:
        self.roster.check_integrity()
        for lane in self._lanes.values():
            lane.check_integrity()
            assert self.fates.running or lane.model.users == 0, f"{lane.model.key}: in use, and nothing runs"
        # One with each thread, those that schedule and hand back among them, and what fits into the queues between.
        places = 0 if self._crew is None else self._crew.computers + 5
        assert len(self.fates.running) <= places, "batches that nobody computes"

    # What there is to do.

    def next_batch(self) -> Batch | None:
        """Wait for the next batch, whatever lane it is of; None when nobody needs this crew any more."""
        with self.changed:
            while True:
                shortest = self._forget_unused()
                if not self._lanes and not self.fates.running:
                    self._crew = None
                    return None
                self.roster.arrange(self._lanes.values())
                for lane in self._lanes.values():
                    # When the model comes or stays, this is looked at again.
                    if not lane.model.is_ready or lane.model.is_leaving or not lane.has_work():
                        continue
                    found = lane.next(self.now(), idle=not self.fates.running)
                    if isinstance(found, Batch):
                        self._lanes[lane.key] = self._lanes.pop(lane.key)  # The others first, next time.
                        self.fates.begin(found)
                        return found
                    shortest = min(shortest, _IDLE_S if found is None else found)
                if not self.fates.running:
                    self._check_integrity()
                self.changed.wait(shortest)

    def _forget_unused(self) -> float:
        """Let go of models that nobody has used for long; returns when to look again."""
        now, soonest = self.now(), _IDLE_S
        under_way = {batch.lane for batch in self.fates.running}
        for lane in [lane for lane in self._unused if lane not in under_way and not lane.has_work()]:
            left = lane.unused_since + _IDLE_S - now
            if left > 0:
                soonest = min(soonest, left)
                continue
            del self._lanes[lane.key]
            self._unused.discard(lane)
            if all(other.model is not lane.model for other in self._lanes.values()):
                self.roster.forget(lane.model)
        return soonest

    # What becomes of a load; each is called by the thread that loads.

    def loaded(self, model: Model, attempt: int, loaded: Loaded) -> None:
        with self.changed:
            dropped = self.roster.loaded(model, attempt, loaded, self._lanes.values())
            self.roster.dropping += 1
            self.wake()
        drop(dropped)
        with self.changed:
            self.roster.dropping -= 1
            self.wake()

    def load_failed(self, model: Model, attempt: int, error: BaseException) -> None:
        with self.changed:
            self.roster.load_failed(model, attempt, error, self._lanes.values())
            self.wake()

    def evict_one_idle(self) -> Dropped:
        with self.changed:
            return self.roster.evict_one_idle(self._lanes.values())

    def fail_work_of(self, model: Model, error: BaseException) -> None:
        """All that waits for this model, which can't be had; under the lock."""
        for lane in [lane for lane in self._lanes.values() if lane.model is model]:
            self.fates.fail_all(lane, error)

    def _abandon_overdue(self) -> bool:
        """Give up batches and loads that took too long. Their threads can't be ended, only left alone."""
        overdue = [batch for batch in self.fates.running if self._is_overdue(batch)]
        for batch in overdue:
            timeout, lane = batch.lane.settings.timeout, batch.lane
            self.fates.abandon(batch, _took_too_long(timeout))
            assert self._crew is not None
            self._crew.replace_thread_of(batch)
            if lane.handler.should_garbage_collect_on_timeout():
                self.roster.retire(lane.model)
                logging.getLogger(__name__).warning("A model took longer than %s seconds and is loaded anew.", timeout)
            self.wake()
        late = [lane for lane in self._lanes.values() if self._waits_too_long_for_a_load(lane)]
        for lane in late:
            self.roster.overdue(lane.model, lane.handler.should_garbage_collect_on_timeout())
            self.fates.fail_all(lane, _took_too_long(lane.settings.timeout))
        return bool(overdue or late)

    def _waits_too_long_for_a_load(self, lane: Lane) -> bool:
        timeout, model = lane.settings.timeout, lane.model
        if timeout is None or model.state is not State.LOADING or not lane.has_work():
            return False
        return self.now() - max(model.load_begun, lane.waiting_since()) >= timeout

    def _is_overdue(self, batch: Batch) -> bool:
        timeout = batch.lane.settings.timeout
        return timeout is not None and batch.due_from is not None and self.now() - batch.due_from >= timeout


def _took_too_long(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"The model took longer than {timeout} seconds.")
