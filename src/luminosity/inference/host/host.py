"""The model host: owns a device's models, gathers examples from all bundles of a process, and runs batches.

Only :class:`ModelHost` knows the other classes of this folder:

- :class:`~luminosity.inference.host.model_scheduler.ModelScheduler` decides which model is loaded, evicted or failed.
- :class:`~luminosity.inference.host.device_threads.InFlight` keeps the batches under way and returns their outcomes.
- :class:`~luminosity.inference.host.lane.Lane` queues the examples of one model version and cuts batches.
- :class:`~luminosity.inference.host.lane.LaneQueue` chooses the lane that gets the next batch.
- :mod:`~luminosity.inference.host.model` and :class:`~luminosity.inference.host.device_threads.DeviceThreads` do the
  work in threads and report through callbacks.
- :class:`~luminosity.inference.host.session.Session` is what a bundle's thread holds.

One lock, a condition, protects all of their state. It is never held while a model is loaded, dropped or run. A change
that a thread may wait for notifies the condition. Three kinds of threads take the lock: the threads of bundles (in
sessions and in the host's public methods), the device threads, and one thread for each load. Methods below whose
docstring says "lock held" need it held by the caller.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from typing import Any

from luminosity._shared.hangs import Frames, Wait, frames_of, stack_text
from luminosity._shared.text import shorten
from luminosity._shared.user_code import is_users
from luminosity.errors import HostUnavailable
from luminosity.inference.blocks import Block
from luminosity.inference.handler import Handler
from luminosity.inference.host.device_threads import BatchCallbacks, DeviceThreads, InFlight
from luminosity.inference.host.interface import Ahead
from luminosity.inference.host.lane import Lane, LaneQueue, LaneSettings
from luminosity.inference.host.model import (
    Dropped,
    LoadCallbacks,
    Loaded,
    LoadStats,
    Model,
    State,
    drop,
    drop_in_background,
    start_load,
)
from luminosity.inference.host.model_scheduler import Decision, ModelScheduler
from luminosity.inference.host.session import Session
from luminosity.inference.host.work import Batch, Outcome, Submitter
from luminosity.inference.memory import forget_frames, make_room_after

__all__ = ["ModelHost"]

_LOGGER = logging.getLogger(__name__)

_IDLE_S = 60.0  # how long an unused model and idle threads are kept: longer than the pause between two bundles
_AT_WORK = frozenset({"_predict", "_collate", "_collect", "load"})  # functions around the calls of a handler
_MOST_STACKS = 4  # models that compute several batches at once have as many threads
_LABEL_CHARACTERS = 80  # of a model's name: a handler's repr may be long
_LOOK_AGAIN_S = 1.0  # how late a timeout or a broken thread is noticed at most
_SHORTEST_LOOK_S = 0.01  # with a very short timeout, check no more often than this
_RETRY_LOAD_S = 60.0  # how long after a failure a model may be loaded ahead of its work again


class ModelHost:
    """Runs the models of one device for all bundles and threads of a process.

    Public methods may be called from any thread, without the lock.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, budget: int | None = None, device: str = "cpu"
    ) -> None:
        """``budget``: the bytes that all models may take together; None for no limit."""
        self.broken: BaseException | None = None
        """The error that ended a device thread; the host can't be used any more."""
        self._now = clock
        self._changed = threading.Condition()
        self._scheduler = ModelScheduler(budget, device)
        self._in_flight = InFlight()
        self._lanes: dict[Hashable, Lane] = {}
        self._queue = LaneQueue()
        self._with_timeout: set[Lane] = set()
        self._unused: OrderedDict[Lane, None] = OrderedDict()
        """Lanes that no step uses, the one that is unused for longest first."""
        self._progressed_at = clock()
        """When a batch or a load ended last."""
        self._is_checked = False
        """Whether the integrity was checked since the last batch or load."""
        self._threads: DeviceThreads | None = None
        """None while there is nothing to do."""

    # What steps and services call.

    def enter(self, key: Hashable, make_handler: Callable[[], Handler[Any, Any, Any]], settings: LaneSettings) -> Lane:
        """Return the lane with this key, which the first caller creates. Call :meth:`leave` once for each call."""
        with self._changed:
            lane = self._lanes.get(key)
            if lane is None:
                handler = make_handler()
                name = ("lane", key) if settings.model is None else ("model", settings.model)
                model = self._scheduler.model(name, handler, settings.clock, settings.family, self._now())
                model.label = settings.label or model.label
                lane = self._lanes[key] = Lane(key, handler, model, settings, self._lane_changed)
                self._scheduler.add_lane(lane)
                if settings.timeout is not None:
                    self._with_timeout.add(lane)
            lane.users += 1
            self._unused.pop(lane, None)
            if self._threads is None:
                self._threads = self._start_threads()
            self._threads.grow_to(lane.model.concurrency)
            return lane

    def leave(self, lane: Lane) -> None:
        """Leave a lane. After the last user has left, the lane and its model are kept for a minute."""
        with self._changed:
            lane.users -= 1
            lane.unused_since = self._now()
            if not lane.users:
                self._unused[lane] = None
                if len(self._unused) == 1:  # Otherwise the first of them is looked at before this one.
                    self._changed.notify_all()

    def open(self, step: Any = None) -> Session:
        """Open a session for the calling thread, which closes it; ``step`` is the Beam step it works for."""
        return Session(self._changed, self._now, self._wait_until, self.describe_wait, step)

    def describe_wait(self, lanes: Collection[Lane]) -> Wait:
        """Return how this host does with the models of these lanes, for a bundle that waits for them. Any thread."""
        models = list(dict.fromkeys(lane.model for lane in list(lanes)))
        loading = [model for model in models if model.state is State.LOADING]
        shown = (loading or models)[:1]
        begun = shown[0].load_begun if loading else self._progressed_at
        at_work = _at_work()
        users = [(frame, line) for frames in at_work for frame, line in frames if is_users(frame)]
        return Wait(
            f"the model {shorten(shown[0].label, _LABEL_CHARACTERS)}" if shown else "a model",
            quiet_seconds=max(0.0, self._now() - begun),
            is_loading=bool(loading),
            stack="\n\n".join(map(stack_text, at_work)),
            location=f"{users[-1][0].f_code.co_filename}:{users[-1][1]}" if users else "",
        )

    def load(self, lane: Lane) -> None:
        """Block until the lane's model is in memory; raise the error of its load."""
        model = lane.model
        with self._changed:
            failures = model.failures
            model.waiters += 1
            self._scheduler.request(model)
            self._changed.notify_all()
            try:
                while not model.is_ready:
                    if model.failures > failures:
                        assert model.error is not None
                        raise model.error
                    self._wait(_LOOK_AGAIN_S)
            finally:
                if model.failures == failures:  # A failure has reset the count of waiters.
                    model.waiters -= 1

    def size_of(self, lane: Lane) -> int:
        """Return the bytes of the lane's model; 0 if it was never loaded."""
        with self._changed:
            return lane.model.size or 0

    def unload(self, lane: Lane) -> None:
        """Drop the lane's model from memory. The next batch loads it again."""
        with self._changed:
            evicted = self._scheduler.retire(lane.model, self._now())
        drop(evicted)

    def load_ahead(self, lane: Lane, instead_of: Lane | None = None) -> Ahead:
        """Request a model before there is work for it, and return how far its load is; does not block.

        If the model fits only in place of that of ``instead_of``, it replaces that model once it is loaded, and gets
        the examples that wait for it.
        """
        model = lane.model
        with self._changed:
            if model.is_ready:
                return Ahead.READY
            if model.state is State.ABSENT:
                if model.error is not None and self._now() - model.failed_at < _RETRY_LOAD_S:
                    return Ahead.FAILED
                if model.does_not_fit_beside:
                    if instead_of is None:
                        return Ahead.NO_ROOM
                    self._scheduler.replace(instead_of, lane)
                model.is_awaited = True
                self._scheduler.request(model)
                self._changed.notify_all()
            return Ahead.LOADING

    def take_over(self, old: Lane, new: Lane) -> None:
        """Move the examples of a lane that are not yet cut into batches to another lane."""
        with self._changed:
            old.move_to(new)
            self._changed.notify_all()

    def take_load_stats(self, lanes: list[Lane]) -> list[list[LoadStats]]:
        """Return, for each lane, the loads of its model since the last call."""
        with self._changed:
            return [lane.model.take_load_stats() for lane in lanes]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the state is inconsistent."""
        with self._changed:
            self._check_integrity()

    def _check_integrity(self) -> None:
        self._scheduler.check_integrity()
        running = self._in_flight.running
        for lane in self._lanes.values():
            lane.check_integrity()
            assert running or lane.model.users == 0, f"{lane.model.key}: in use, and nothing runs"
        capacity = 0 if self._threads is None else self._threads.capacity
        assert len(running) <= capacity, f"{len(running)} batches are under way, and {capacity} have a thread"

    # What the threads of bundles do while they wait for outcomes.

    def _wait_until(self, condition: Callable[[], bool], lanes: Collection[Lane]) -> None:
        """Block until the condition holds; meanwhile abandon what exceeds its timeout. Lock held."""
        timeouts = [lane.settings.timeout for lane in lanes if lane.settings.timeout is not None]
        look_again = min([_LOOK_AGAIN_S, *(max(timeout / 10, _SHORTEST_LOOK_S) for timeout in timeouts)])
        while not condition():
            if not self._abandon_overdue():
                self._wait(look_again)

    def _wait(self, seconds: float) -> None:
        """Wait for a change. Lock held; the wait releases it."""
        if self.broken is not None:
            raise HostUnavailable("a thread of the model host has failed") from self.broken
        self._changed.wait(seconds)

    def _abandon_overdue(self) -> bool:
        """Fail the examples of batches and loads that exceed their timeouts. Lock held.

        Their threads can't be stopped. A batch's thread is replaced; a load goes on beside the next one.
        """
        overdue = [batch for batch in self._in_flight.running if self._is_overdue(batch)]
        for batch in overdue:
            timeout, lane = batch.lane.settings.timeout, batch.lane
            self._settle(batch, self._in_flight.abandon(batch, _timeout_error(timeout), self._now()))
            assert self._threads is not None
            self._threads.replace_thread_of(batch)
            if lane.handler.should_garbage_collect_on_timeout():
                self._load_again(lane.model)
                _LOGGER.warning("A model took longer than %s seconds and is loaded anew.", timeout)
        late = [lane for lane in self._with_timeout if self._waits_too_long_for_a_load(lane)]
        for lane in late:
            abandon = lane.handler.should_garbage_collect_on_timeout()
            self._scheduler.mark_overdue(lane.model, abandon, self._now())
            self._fail_waiting(lane, _timeout_error(lane.settings.timeout))
        return bool(overdue or late)

    def _is_overdue(self, batch: Batch) -> bool:
        timeout = batch.lane.settings.timeout
        return timeout is not None and batch.due_from is not None and self._now() - batch.due_from >= timeout

    def _waits_too_long_for_a_load(self, lane: Lane) -> bool:
        timeout, model = lane.settings.timeout, lane.model
        if timeout is None or model.state is not State.LOADING or not lane.has_work():
            return False
        return self._now() - max(model.load_begun, lane.waiting_since()) >= timeout

    def _load_again(self, model: Model) -> None:
        """Evict a model that hangs, so that the next batch loads it again. Lock held."""
        retired = self._scheduler.retire(model, self._now())
        _abandon(model.handler, retired)
        drop_in_background(retired)

    # What the device threads call.

    def _start_threads(self) -> DeviceThreads:
        calls = BatchCallbacks(
            next_batch=self._next_batch,
            succeeded=self._batch_succeeded,
            failed=self._batch_failed,
            put_back=self._put_back,
            broke=self._thread_broke,
        )
        return DeviceThreads(self._changed, self._now, calls)

    def _next_batch(self) -> Batch | None:
        """Block until a lane has a batch, and return it; None when no lane is left and the threads may end."""
        with self._changed:
            while True:
                now = self._now()
                shortest = self._forget_unused(now)
                if not self._lanes and not self._in_flight.running:
                    self._threads = None
                    return None
                self._carry_out(self._scheduler.plan(now))
                found = self._queue.next(self._now(), is_idle=not self._in_flight.running)
                if isinstance(found, Batch):
                    self._in_flight.begin(found, self._now())
                    self._is_checked = False
                    return found
                if not (self._is_checked or self._in_flight.running or self._scheduler.is_loading):
                    self._check_integrity()
                    self._is_checked = True
                self._changed.wait(min(shortest, found))

    def _forget_unused(self, now: float) -> float:
        """Remove lanes that were unused for long, with their models; return when to look again. Lock held."""
        under_way = {batch.lane for batch in self._in_flight.running}
        for lane in list(self._unused):
            left = lane.unused_since + _IDLE_S - now
            if left > 0:
                return left
            if lane in under_way or lane.has_work():
                continue
            del self._lanes[lane.key], self._unused[lane]
            self._with_timeout.discard(lane)
            drop_in_background(self._scheduler.remove_lane(lane, now))
        return _IDLE_S

    def _lane_changed(self, lane: Lane) -> None:
        """Look at a lane that may have a batch now, or have its model loaded. Lock held."""
        if lane.model.is_ready:
            self._queue.add(lane)
        else:
            self._scheduler.request(lane.model)

    def _batch_succeeded(self, batch: Batch, values: Block, model_id: str | None, ready: float, ready_ns: int) -> None:
        with self._changed:
            if not batch.abandoned:
                outcomes = self._in_flight.succeed(batch, values, model_id, ready, ready_ns, self._now())
                self._settle(batch, outcomes)

    def _batch_failed(self, batch: Batch, error: BaseException, by_its_examples: bool) -> None:
        forget_frames(error)  # They hold what the model has computed, and the model; the error may outlive both.
        too_large = by_its_examples and make_room_after(error)
        if too_large and self._retry_without_an_idle_model(batch):
            return
        with self._changed:
            if not batch.abandoned:
                outcomes = self._in_flight.fail(
                    batch, error, self._now(), too_large=too_large, by_its_examples=by_its_examples
                )
                self._settle(batch, outcomes)

    def _retry_without_an_idle_model(self, batch: Batch) -> bool:
        """Evict a model without work and retry the batch: smaller batches are the last resort."""
        with self._changed:
            if not self._scheduler.has_budget or batch.abandoned:
                return False
            evicted = self._scheduler.evict_one_idle(self._now())
            if not evicted:
                return False
            batch.counting_session().count(batch.lane, replace(batch.stats, failed=True, out_of_memory=True))
        drop(evicted)
        self._put_back(batch)
        return True

    def _put_back(self, batch: Batch) -> None:
        with self._changed:
            if not batch.abandoned:
                self._in_flight.put_back(batch)
                self._changed.notify_all()

    def _thread_broke(self, error: BaseException) -> None:
        with self._changed:
            self.broken = error
            self._changed.notify_all()

    # What the threads of loads call.

    def _loaded(self, model: Model, attempt: int, loaded: Loaded) -> None:
        with self._changed:
            self._progressed_at = self._now()
            decision = self._scheduler.finish_load(model, attempt, loaded, self._now())
            self._carry_out(decision)
            self._is_checked = False
            for lane in self._scheduler.lanes_of(model):
                self._queue.add(lane)
            self._scheduler.begin_drop()
            self._changed.notify_all()
        try:
            if decision.dropped:
                drop(decision.dropped)
        finally:  # A library may fail to release memory; other models must still be loaded.
            with self._changed:
                self._scheduler.end_drop()
                self._changed.notify_all()

    def _load_failed(self, model: Model, attempt: int, error: BaseException) -> None:
        with self._changed:
            self._carry_out(self._scheduler.fail_load(model, attempt, error, self._now()))
            self._is_checked = False
            self._changed.notify_all()

    def _evict_one_idle(self) -> Dropped:
        with self._changed:
            return self._scheduler.evict_one_idle(self._now())

    # Carrying out decisions and outcomes.

    def _carry_out(self, decision: Decision) -> None:
        """Do what the scheduler decided, except the drop, which needs the lock released. Lock held."""
        for model, error in decision.failed:
            for lane in self._scheduler.lanes_of(model):
                self._fail_waiting(lane, error)
        for old, new in decision.moved:
            old.move_to(new)
        for model in decision.staying:
            for lane in self._scheduler.lanes_of(model):
                self._queue.add(lane)
        if decision.load is not None:
            calls = LoadCallbacks(self._evict_one_idle, self._loaded, self._load_failed)
            start_load(decision.load.model, decision.load.attempt, decision.load.evicted, calls)

    def _fail_waiting(self, lane: Lane, error: BaseException) -> None:
        """Fail all examples that wait in a lane. Lock held."""
        for batch in lane.take_all(self._now()):
            batch.stats.failed = True
            self._settle(batch, batch.failures(error, 0))
        self._changed.notify_all()

    def _settle(self, batch: Batch, outcomes: list[tuple[Submitter, Outcome]]) -> None:
        """Count a batch that has ended and deliver its outcomes. Lock held."""
        self._progressed_at = self._now()
        batch.counting_session().count(batch.lane, batch.stats)
        for session, outcome in outcomes:
            session.deliver(outcome)
        self._changed.notify_all()


def _at_work() -> list[Frames]:
    """Return the stacks of this process's threads that load a model or work on a batch, from the user's code on."""
    threads = [thread.ident or 0 for thread in threading.enumerate() if thread.name.startswith("model-host-")]
    found: list[Frames] = []
    for frames in map(frames_of, threads):
        if _AT_WORK.intersection(frame.f_code.co_name for frame, _ in frames):
            first = next((place for place, (frame, _) in enumerate(frames) if is_users(frame)), 0)
            found.append(frames[first:])
    return found[:_MOST_STACKS]


def _timeout_error(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"The model took longer than {timeout} seconds.")


def _abandon(handler: Handler[Any, Any, Any], retired: Dropped) -> None:
    """Tell the handler that these copies are given up. Keeps no reference, so that the drop frees them at once."""
    for copies, _ in retired:
        for copy in copies:
            handler.abandon(copy)
