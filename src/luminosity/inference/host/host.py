"""The threads around a device: one cuts and stacks batches, one computes, one hands back."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

from luminosity.inference.handler import Handler
from luminosity.inference.host.counting import as_part_of
from luminosity.inference.host.lane import Lane, LaneSettings
from luminosity.inference.host.session import Session
from luminosity.inference.host.work import Batch, Outcome
from luminosity.inference.memory_errors import is_out_of_memory, release_memory

__all__ = ["ModelHost"]

_IDLE_S = 60.0
"""How long a model that nobody uses is kept, and threads that have nothing to do."""
_LOOK_AGAIN_S = 1.0
_SWITCH_S = 0.0005
"""How long another thread may keep the interpreter from the one that gives the device work, and loses it each time."""


class ModelHost:
    """Gathers from all bundles and threads of this process, and keeps one device busy.

    While the device computes a batch the next one is collated and moved, and the one before is handed back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self.changed = threading.Condition()
        """Guards everything here, in the lanes and in the sessions; notified at every change."""
        self._lanes: dict[Hashable, Lane] = {}
        self._running: set[Batch] = set()
        self._to_compute: queue.Queue[Batch | None] = queue.Queue(1)
        self._to_return: queue.Queue[tuple[Batch, Any] | None] = queue.Queue(2)
        self._computers = 0
        self._started = False
        self._ready_before = 0.0

    def enter(self, key: Hashable, make_handler: Callable[[], Handler[Any, Any, Any]], settings: LaneSettings) -> Lane:
        """The lane of this model, made by whoever comes first; to be left as often as it is entered."""
        with self.changed:
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = Lane(key, make_handler(), settings)
            lane.users += 1
            return lane

    def leave(self, lane: Lane) -> None:
        with self.changed:
            lane.users -= 1

    def open(self, lane: Lane, step: Any = None) -> Session:
        with self.changed:
            self._start()
            return Session(self, lane, step)

    def wake(self) -> None:
        self.changed.notify_all()

    def wait_until(self, true: Callable[[], bool], lane: Lane) -> None:
        """Wait under the lock. Bounded by the work itself, and by the lane's timeout where it has one."""
        while not true():
            self._abandon_overdue()
            timeout = lane.settings.timeout
            self.changed.wait(_LOOK_AGAIN_S if timeout is None else min(_LOOK_AGAIN_S, max(timeout / 10, 0.01)))

    def check_integrity(self) -> None:
        """What must hold when nothing is under way; raises where it does not."""
        with self.changed:
            for lane in self._lanes.values():
                assert min(lane.users, lane.producing) >= 0, f"{lane.key}: negative counts"
                assert self._running or not lane.retries, f"{lane.key}: forgotten batches"
            assert len(self._running) <= self._computers + 4, "batches that nobody computes"

    # The threads.

    def _start(self) -> None:
        if not self._started:
            self._started = True
            sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
            self._spawn("schedule", self._schedule)
            self._spawn("return", self._hand_back)
        wanted = max((lane.concurrency for lane in self._lanes.values()), default=1)
        while self._computers < wanted:
            self._computers += 1
            self._spawn("compute", self._compute)

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=f"model-host-{name}", daemon=True).start()

    def _schedule(self) -> None:
        while (batch := self._next_batch()) is not None:
            handler, stats = batch.lane.handler, batch.stats
            try:
                begun = self.now()
                collated = handler.collate(batch.prepared())
                stats.num_bytes, stats.count = (
                    handler.get_num_bytes(collated),
                    handler.num_examples(collated, batch.count),
                )
                stacked = self.now()
                batch.inputs = handler.transfer(collated)
                stats.collate, stats.transfer = stacked - begun, self.now() - stacked
            except BaseException as error:
                self._failed(batch, error)
                continue
            self._to_compute.put(batch)  # Bounded by the batch that computes now, or by its timeout.
        for _ in range(self._computers):
            self._to_compute.put(None)
        self._to_return.put(None)

    def _next_batch(self) -> Batch | None:
        with self.changed:
            while True:
                shortest = _IDLE_S
                for lane in list(self._lanes.values()):
                    found = lane.next(self.now(), idle=not self._running)
                    if isinstance(found, Batch):
                        self._lanes[lane.key] = self._lanes.pop(lane.key)  # The others first, next time.
                        self._running.add(found)
                        return found
                    shortest = min(shortest, _IDLE_S if found is None else found)
                if not self.changed.wait(shortest) and shortest == _IDLE_S and self._forget_unused():
                    return None

    def _forget_unused(self) -> bool:
        """Whether nothing is left to do for these threads."""
        for lane in [lane for lane in self._lanes.values() if not lane.users]:
            lane.models.release()
            del self._lanes[lane.key]
        if self._lanes or self._running:
            return False
        self._started = False
        self._to_compute, self._to_return = queue.Queue(1), queue.Queue(2)
        return True

    def _compute(self) -> None:
        to_compute, to_return = self._to_compute, self._to_return
        while (batch := to_compute.get()) is not None:
            lane = batch.lane
            lane.slots.acquire()  # Bounded as the batches that hold them are.
            batch.started, batch.started_ns = self.now(), lane.settings.clock.time_ns()
            try:
                with as_part_of(batch.parts[0][0].session.step):
                    outputs = lane.handler.predict(lane.models.next(), batch.inputs, lane.settings.inference_args)
            except BaseException as error:
                self._failed(batch, error)
            else:
                to_return.put((batch, outputs))
            with self.changed:
                if batch.abandoned:
                    return  # Another thread has taken this one's place, and its slot.
                lane.slots.release()

    def _hand_back(self) -> None:
        to_return = self._to_return
        while (item := to_return.get()) is not None:
            batch, outputs = item
            handler = batch.lane.handler
            try:
                with as_part_of(batch.parts[0][0].session.step):
                    handler.wait(outputs)
                    ready, ready_ns = self.now(), batch.lane.settings.clock.time_ns()
                    values = handler.collect(outputs)
                self._check_count(batch, values)
            except BaseException as error:
                self._failed(batch, error)
                continue
            self._succeeded(batch, values, ready, ready_ns)

    # What becomes of a batch.

    def _check_count(self, batch: Batch, values: Any) -> None:
        if len(values) != batch.count:
            raise ValueError(
                f"{batch.lane.handler} returned {len(values)} predictions for {batch.count} examples; "
                "it must return one for each, in their order"
            )

    def _succeeded(self, batch: Batch, values: Any, ready: float, ready_ns: int) -> None:
        assert batch.started is not None
        stats, lane = batch.stats, batch.lane
        with self.changed:
            if batch.abandoned:
                return
            stats.compute = ready - batch.started
            stats.busy = ready - max(batch.started, self._ready_before)
            stats.latency_micro_secs = (ready_ns - batch.started_ns) // 1000
            stats.collect = self.now() - ready
            self._ready_before = ready
            lane.policy.budget.succeeded(batch.padded, max(stats.busy, 1e-9))
            self._end(batch)
            done = 0
            for submission, places in batch.parts:
                part = values[done : done + len(places)]
                done += len(places)
                submission.session.deliver(Outcome(submission.tag, places, part, None, lane.handler.model_id))
            self.wake()

    def _failed(self, batch: Batch, error: BaseException) -> None:
        lane = batch.lane
        too_large = is_out_of_memory(error)
        if too_large:
            release_memory()
        with self.changed:
            if batch.abandoned:
                return
            batch.stats.failed, batch.stats.out_of_memory = True, too_large
            if too_large:
                lane.policy.budget.out_of_memory(batch.padded)
            if batch.count > 1 and (too_large or lane.settings.isolate_failures):
                lane.retries.extendleft(reversed(batch.halves()))
                self._end(batch)
            else:
                self._fail_examples(batch, error)
            self.wake()

    def _abandon_overdue(self) -> None:
        """Give up batches that took too long. Their threads can't be ended, only left alone."""
        for batch in list(self._running):
            timeout = batch.lane.settings.timeout
            if timeout is None or batch.started is None or self.now() - batch.started < timeout:
                continue
            batch.abandoned = batch.stats.failed = True
            self._fail_examples(batch, TimeoutError(f"The model took longer than {timeout} seconds."))
            batch.lane.slots.release()
            self._spawn("compute", self._compute)
            if batch.lane.handler.should_garbage_collect_on_timeout():
                batch.lane.models.retire(timeout)
                logging.getLogger(__name__).warning("A model took longer than %s seconds and is loaded anew.", timeout)

    def _fail_examples(self, batch: Batch, error: BaseException) -> None:
        self._end(batch)
        for submission, places in batch.parts:
            submission.session.deliver(Outcome(submission.tag, places, None, error, batch.lane.handler.model_id))

    def _end(self, batch: Batch) -> None:
        self._running.discard(batch)
        batch.parts[0][0].session.count(batch.stats)
