"""The work of one device: its lanes, loads and batches, and which of them is next.

- :class:`~luminosity.inference.host.model_scheduler.ModelScheduler` decides which model is loaded, evicted or failed.
- :class:`~luminosity.inference.host.lane.Lane` queues the examples of one model version and cuts batches;
  :class:`~luminosity.inference.host.lane.LaneQueue` chooses the lane that gets the next batch.
- :class:`~luminosity.inference.host.device_threads.InFlight` keeps the batches under way and returns their outcomes.
- :mod:`~luminosity.inference.host.model` and :class:`~luminosity.inference.host.device_threads.DeviceThreads` do the
  work in threads and report through callbacks.

One lock, a condition, protects all of their state. It is never held while a model is loaded, dropped or run. A change
that a thread may wait for notifies the condition. Three kinds of threads take the lock: the threads of bundles (in
sessions and in the host), the device threads, and one thread for each load.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from typing import Any

from luminosity.errors import HostUnavailable, ModelDied
from luminosity.inference.blocks import Block
from luminosity.inference.handler import Handler
from luminosity.inference.host.device_threads import BatchCallbacks, DeviceThreads, InFlight
from luminosity.inference.host.interface import Outcome
from luminosity.inference.host.lane import Batch, Lane, LaneQueue, Submitter
from luminosity.inference.host.model import (
    Dropped,
    LoadCallbacks,
    Loaded,
    Model,
    State,
    drop,
    drop_in_background,
    start_load,
)
from luminosity.inference.host.model_scheduler import Decision, ModelScheduler
from luminosity.inference.memory import forget_frames, make_room_after

__all__ = ["LOOK_AGAIN_S", "Device"]

_LOGGER = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""How late a timeout or a broken thread is noticed at most."""
_SHORTEST_LOOK_S = 0.01  # with a very short timeout, check no more often than this
_IDLE_S = 60.0  # how long an unused model and idle threads are kept: longer than the pause between two bundles


class Device:
    """Runs the batches of all lanes of a device, and loads and evicts their models.

    The caller holds ``lock`` in every public method.
    """

    def __init__(self, clock: Callable[[], float], budget: int | None, name: str) -> None:
        self.now = clock
        self.lock = threading.Condition()
        self.scheduler = ModelScheduler(budget, name)
        self.in_flight = InFlight()
        self.lanes: dict[Hashable, Lane] = {}
        self.broken: BaseException | None = None
        """The error that ended a device thread; the device can't be used any more."""
        self.progressed_at = clock()
        """When a batch or a load ended last."""
        self._queue = LaneQueue()
        self._with_timeout: set[Lane] = set()
        self._unused: OrderedDict[Lane, None] = OrderedDict()
        """Lanes that no step uses, the one that is unused for longest first."""
        self._is_checked = False
        """Whether the integrity was checked since the last batch or load."""
        self._threads: DeviceThreads | None = None
        """None while there is nothing to do."""

    def add(self, lane: Lane) -> None:
        """Add a new lane."""
        self.lanes[lane.key] = lane
        self.scheduler.add_lane(lane)
        if lane.settings.timeout is not None:
            self._with_timeout.add(lane)

    def use(self, lane: Lane) -> None:
        """Count one more user of a lane, and start the threads that it needs."""
        lane.users += 1
        self._unused.pop(lane, None)
        if self._threads is None:
            calls = BatchCallbacks(
                self._next_batch, self._batch_succeeded, self._batch_failed, self._put_back, self._thread_broke
            )
            self._threads = DeviceThreads(self.lock, self.now, calls)
        self._threads.grow_to(lane.model.concurrency)

    def leave(self, lane: Lane) -> None:
        """Count one user less. After the last user has left, the lane and its model are kept for a minute."""
        lane.users -= 1
        lane.unused_since = self.now()
        if not lane.users:
            self._unused[lane] = None
            if len(self._unused) == 1:  # Otherwise the first of them is looked at before this one.
                self.lock.notify_all()

    def lane_changed(self, lane: Lane) -> None:
        """Look at a lane that may have a batch now, or have its model loaded."""
        if lane.model.is_ready:
            self._queue.add(lane)
        else:
            self.scheduler.request(lane.model)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the state is inconsistent."""
        self.scheduler.check_integrity()
        running = self.in_flight.running
        with_thread = [batch for batch in running if batch.future is None]
        for lane in self.lanes.values():
            lane.check_integrity()
            assert running or lane.model.users == 0, f"{lane.model.key}: in use, and nothing runs"
        capacity = 0 if self._threads is None else self._threads.capacity
        assert len(with_thread) <= capacity, f"{len(with_thread)} batches are under way, and {capacity} have a thread"

    # What the threads of bundles do while they wait for outcomes.

    def wait_until(self, condition: Callable[[], bool], lanes: Collection[Lane]) -> None:
        """Block until the condition holds; meanwhile abandon what exceeds its timeout."""
        timeouts = [lane.settings.timeout for lane in lanes if lane.settings.timeout is not None]
        look_again = min([LOOK_AGAIN_S, *(max(timeout / 10, _SHORTEST_LOOK_S) for timeout in timeouts)])
        while not condition():
            if not self._abandon_overdue():
                self.wait(look_again)

    def wait(self, seconds: float) -> None:
        """Wait for a change. The wait releases the lock."""
        if self.broken is not None:
            raise HostUnavailable("a thread of the model host has failed") from self.broken
        self.lock.wait(seconds)

    def _abandon_overdue(self) -> bool:
        """Fail the examples of batches and loads that exceed their timeouts.

        Their threads can't be stopped. A batch's thread is replaced; a load goes on beside the next one.
        """
        overdue = [batch for batch in self.in_flight.running if self._is_overdue(batch)]
        for batch in overdue:
            timeout, lane = batch.lane.settings.timeout, batch.lane
            self._settle(batch, self.in_flight.abandon(batch, _timeout_error(timeout), self.now()))
            assert self._threads is not None
            self._threads.replace_thread_of(batch)
            if batch.future is not None:
                batch.future.cancel()
            if lane.handler.should_garbage_collect_on_timeout():
                self._load_again(lane.model)
                _LOGGER.warning("A model took longer than %s seconds and is loaded anew.", timeout)
        late = [lane for lane in self._with_timeout if self._waits_too_long_for_a_load(lane)]
        for lane in late:
            abandon = lane.handler.should_garbage_collect_on_timeout()
            self.scheduler.mark_overdue(lane.model, abandon, self.now())
            self._fail_waiting(lane, _timeout_error(lane.settings.timeout))
        return bool(overdue or late)

    def _is_overdue(self, batch: Batch) -> bool:
        timeout = batch.lane.settings.timeout
        return timeout is not None and batch.due_from is not None and self.now() - batch.due_from >= timeout

    def _waits_too_long_for_a_load(self, lane: Lane) -> bool:
        timeout, model = lane.settings.timeout, lane.model
        if timeout is None or model.state is not State.LOADING or not lane.has_work():
            return False
        return self.now() - max(model.load_begun, lane.waiting_since()) >= timeout

    def _load_again(self, model: Model) -> None:
        """Evict a model that hangs, so that the next batch loads it again."""
        retired = self.scheduler.retire(model, self.now())
        _abandon(model.handler, retired)
        drop_in_background(retired)

    # What the device threads call.

    def _next_batch(self) -> Batch | None:
        """Block until a lane has a batch, and return it; None when no lane is left and the threads may end."""
        with self.lock:
            while True:
                now = self.now()
                shortest = self._forget_unused(now)
                if not self.lanes and not self.in_flight.running:
                    self._threads = None
                    return None
                self._carry_out(self.scheduler.plan(now))
                found = self._queue.next(self.now(), is_idle=not self.in_flight.running)
                if isinstance(found, Batch):
                    self.in_flight.begin(found, self.now())
                    self._is_checked = False
                    return found
                if not (self._is_checked or self.in_flight.running or self.scheduler.is_loading):
                    self.check_integrity()
                    self._is_checked = True
                self.lock.wait(min(shortest, found))

    def _forget_unused(self, now: float) -> float:
        """Remove lanes that were unused for long, with their models; return when to look again."""
        under_way = {batch.lane for batch in self.in_flight.running}
        for lane in list(self._unused):
            left = lane.unused_since + _IDLE_S - now
            if left > 0:
                return left
            if lane in under_way or lane.has_work():
                continue
            del self.lanes[lane.key], self._unused[lane]
            self._with_timeout.discard(lane)
            drop_in_background(self.scheduler.remove_lane(lane, now))
        return _IDLE_S

    def _batch_succeeded(self, batch: Batch, values: Block, model_id: str | None, ready: float, ready_ns: int) -> None:
        with self.lock:
            if not batch.abandoned:
                outcomes = self.in_flight.succeed(batch, values, model_id, ready, ready_ns, self.now())
                self._settle(batch, outcomes)

    def _batch_failed(self, batch: Batch, error: BaseException, by_its_examples: bool) -> None:
        forget_frames(error)  # They hold what the model has computed, and the model; the error may outlive both.
        too_large = by_its_examples and make_room_after(error)
        if too_large and self._retry_without_an_idle_model(batch):
            return
        with self.lock:
            if not batch.abandoned:
                outcomes = self.in_flight.fail(
                    batch, error, self.now(), too_large=too_large, by_its_examples=by_its_examples
                )
                self._settle(batch, outcomes)
                if isinstance(error, ModelDied) and batch.attempt == batch.lane.model.attempt:
                    self._load_again(batch.lane.model)

    def _retry_without_an_idle_model(self, batch: Batch) -> bool:
        """Evict a model without work and retry the batch: smaller batches are the last resort."""
        with self.lock:
            if not self.scheduler.has_budget or batch.abandoned:
                return False
            evicted = self.scheduler.evict_one_idle(self.now())
            if not evicted:
                return False
            batch.counting_session().count(batch.lane, replace(batch.stats, failed=True, out_of_memory=True))
        drop(evicted)
        self._put_back(batch)
        return True

    def _put_back(self, batch: Batch) -> None:
        with self.lock:
            if not batch.abandoned:
                self.in_flight.put_back(batch)
                self._look_for_room(batch)
                self.lock.notify_all()

    def _thread_broke(self, error: BaseException) -> None:
        with self.lock:
            self.broken = error
            self.lock.notify_all()

    # What the threads of loads call.

    def _loaded(self, model: Model, attempt: int, loaded: Loaded) -> None:
        with self.lock:
            self.progressed_at = self.now()
            decision = self.scheduler.finish_load(model, attempt, loaded, self.now())
            self._carry_out(decision)
            self._is_checked = False
            for lane in self.scheduler.lanes_of(model):
                self._queue.add(lane)
            self.scheduler.begin_drop()
            self.lock.notify_all()
        try:
            if decision.dropped:
                drop(decision.dropped)
        finally:  # A library may fail to release memory; other models must still be loaded.
            with self.lock:
                self.scheduler.end_drop()
                self.lock.notify_all()

    def _load_failed(self, model: Model, attempt: int, error: BaseException) -> None:
        with self.lock:
            self._carry_out(self.scheduler.fail_load(model, attempt, error, self.now()))
            self._is_checked = False
            self.lock.notify_all()

    def _evict_one_idle(self) -> Dropped:
        with self.lock:
            return self.scheduler.evict_one_idle(self.now())

    # Carrying out decisions and outcomes.

    def _carry_out(self, decision: Decision) -> None:
        """Do what the scheduler decided, except the drop, which needs the lock released."""
        for model, error in decision.failed:
            for lane in self.scheduler.lanes_of(model):
                self._fail_waiting(lane, error)
        for old, new in decision.moved:
            old.move_to(new)
        for model in decision.staying:
            for lane in self.scheduler.lanes_of(model):
                self._queue.add(lane)
        if decision.load is not None:
            calls = LoadCallbacks(self._evict_one_idle, self._loaded, self._load_failed)
            start_load(decision.load.model, decision.load.attempt, decision.load.evicted, calls)

    def _fail_waiting(self, lane: Lane, error: BaseException) -> None:
        """Fail all examples that wait in a lane."""
        for batch in lane.take_all(self.now()):
            batch.stats.failed = True
            self._settle(batch, batch.failures(error, 0))
        self.lock.notify_all()

    def _settle(self, batch: Batch, outcomes: list[tuple[Submitter, Outcome]]) -> None:
        """Count a batch that has ended and deliver its outcomes."""
        self.progressed_at = self.now()
        batch.counting_session().count(batch.lane, batch.stats)
        for session, outcome in outcomes:
            session.deliver(outcome)
        self._look_for_room(batch)
        self.lock.notify_all()

    def _look_for_room(self, batch: Batch) -> None:
        """Let the lanes of a model that takes examples as they come give it the next one."""
        if batch.lane.submits:
            for lane in self.scheduler.lanes_of(batch.lane.model):
                self._queue.add(lane)


def _timeout_error(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"The model took longer than {timeout} seconds.")


def _abandon(handler: Handler[Any, Any, Any], retired: Dropped) -> None:
    """Tell the handler that these copies are given up. Keeps no reference, so that the drop frees them at once."""
    for copies, _ in retired:
        for copy in copies:
            handler.abandon(copy)
