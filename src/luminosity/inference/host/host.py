"""The threads around a device: one cuts and stacks batches, one computes, one hands back."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from luminosity.inference.blocks import as_block, piece
from luminosity.inference.handler import Handler
from luminosity.inference.host.counting import as_part_of
from luminosity.inference.host.lane import Lane, LaneSettings
from luminosity.inference.host.models import LoadedModels
from luminosity.inference.host.session import Session
from luminosity.inference.host.work import Batch, Outcome, Stage
from luminosity.inference.memory_errors import is_out_of_memory, release_memory

__all__ = ["ModelHost"]

_IDLE_S = 60.0
"""How long a model that nobody uses is kept, and threads that have nothing to do."""
_LOOK_AGAIN_S = 1.0
_SWITCH_S = 0.0005
"""How long another thread may keep the interpreter from the one that gives the device work, and loses it each time."""


@dataclass(frozen=True)
class _Queues:
    """Between the threads. None ends who takes it; threads that start later get queues of their own."""

    to_compute: queue.Queue[Batch | None] = field(default_factory=lambda: queue.Queue(1))
    to_return: queue.Queue[tuple[Batch, Any] | None] = field(default_factory=lambda: queue.Queue(2))


class ModelHost:
    """Gathers from all bundles and threads of this process, and keeps one device busy.

    While the device computes a batch the next one is collated and moved, and the one before is handed back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self.changed = threading.Condition()
        """Guards everything here, in the lanes and in the sessions; notified at every change."""
        self.broken: BaseException | None = None
        """What ended one of the threads, so that nobody waits for it in vain."""
        self._lanes: dict[Hashable, Lane] = {}
        self._running: set[Batch] = set()
        self._queues: _Queues | None = None
        """None while no threads run."""
        self._computers = 0
        self._ready_before = 0.0

    def enter(self, key: Hashable, make_handler: Callable[[], Handler[Any, Any, Any]], settings: LaneSettings) -> Lane:
        """The lane of this key, made by whoever comes first; to be left as often as it is entered."""
        with self.changed:
            lane = self._lanes.get(key)
            if lane is None:
                handler = make_handler()
                models = self._models(settings) or LoadedModels(handler, settings.clock, settings.model_tag)
                lane = self._lanes[key] = Lane(key, handler, models, settings)
            lane.users += 1
            self._start()
            return lane

    def leave(self, lane: Lane) -> None:
        with self.changed:
            lane.users -= 1
            lane.unused_since = self.now()
            self.wake()

    def open(self, lane: Lane, step: Any = None) -> Session:
        with self.changed:
            return Session(self, lane, step)

    def wake(self) -> None:
        self.changed.notify_all()

    def wait_until(self, true: Callable[[], bool], lane: Lane) -> None:
        """Wait under the lock. Bounded by the work itself, and by the lane's timeout where it has one."""
        while not true():
            if self.broken is not None:
                raise RuntimeError("A thread of the model host has failed.") from self.broken
            if self._abandon_overdue():
                continue
            timeout = lane.settings.timeout
            self.changed.wait(_LOOK_AGAIN_S if timeout is None else min(_LOOK_AGAIN_S, max(timeout / 10, 0.01)))

    def check_integrity(self) -> None:
        """What must hold at any time, and more when nothing is under way; raises where it does not."""
        with self.changed:
            for lane in self._lanes.values():
                lane.check_integrity()
                assert self._running or not any(batch.is_wanted() for batch in lane.retries), "forgotten batches"
            assert len(self._running) <= self._computers + 4, "batches that nobody computes"

    def _models(self, settings: LaneSettings) -> LoadedModels | None:
        """Those of another lane that names the same model."""
        same = (lane.models for lane in self._lanes.values() if lane.settings.model == settings.model)
        return None if settings.model is None else next(same, None)

    # The threads.

    def _start(self) -> None:
        if self._queues is None:
            self._queues = _Queues()
            sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
            self._spawn("schedule", self._schedule, self._queues)
            self._spawn("return", self._hand_back, self._queues)
        wanted = max(lane.models.concurrency for lane in self._lanes.values())
        while self._computers < wanted:
            self._computers += 1
            self._spawn("compute", self._compute, self._queues)

    def _spawn(self, name: str, target: Callable[[_Queues], None], queues: _Queues) -> None:
        def run() -> None:
            try:
                target(queues)
            except BaseException as error:
                with self.changed:
                    self.broken = error
                    self.wake()
                raise

        threading.Thread(target=run, name=f"model-host-{name}", daemon=True).start()

    def _schedule(self, queues: _Queues) -> None:
        while (batch := self._next_batch()) is not None:
            if self._stack(batch):
                queues.to_compute.put(batch)  # Bounded by the batch that computes now, or by its timeout.
            del batch  # Its inputs are large.
        queues.to_compute.put(None)
        queues.to_return.put(None)

    def _next_batch(self) -> Batch | None:
        with self.changed:
            while True:
                shortest = self._forget_unused()
                if not self._lanes and not self._running:
                    self._queues, self._computers = None, 0
                    return None
                for lane in list(self._lanes.values()):
                    found = lane.next(self.now(), idle=not self._running)
                    if isinstance(found, Batch):
                        self._lanes[lane.key] = self._lanes.pop(lane.key)  # The others first, next time.
                        self._running.add(found)
                        return found
                    shortest = min(shortest, _IDLE_S if found is None else found)
                self.changed.wait(shortest)

    def _forget_unused(self) -> float:
        """Let go of models that nobody has used for long; returns when to look again."""
        now, soonest = self.now(), _IDLE_S
        under_way = {batch.lane for batch in self._running}
        for lane in [lane for lane in self._lanes.values() if not lane.users and lane not in under_way]:
            left = lane.unused_since + _IDLE_S - now
            if left > 0:
                soonest = min(soonest, left)
                continue
            del self._lanes[lane.key]
            if all(other.models is not lane.models for other in self._lanes.values()):
                # It may wait for the process that holds the model; not this thread's time.
                threading.Thread(target=lane.models.release, name="model-host-release", daemon=True).start()
        return soonest

    def _stack(self, batch: Batch) -> bool:
        handler, stats = batch.lane.handler, batch.stats
        try:
            begun = self.now()
            collated = handler.collate(batch.prepared())
            stats.num_bytes = handler.get_num_bytes(collated)
            stats.count = handler.num_examples(collated, batch.count)
            stacked = self.now()
            batch.inputs = handler.transfer(collated)
            stats.collate, stats.transfer = stacked - begun, self.now() - stacked
        except BaseException as error:
            self._failed(batch, error)
            return False
        return True

    def _compute(self, queues: _Queues) -> None:
        while (batch := queues.to_compute.get()) is not None:
            slots = batch.lane.models.slots
            slots.acquire()  # Bounded as the batches that hold them are.
            with self.changed:
                batch.due_from, batch.stage = self.now(), Stage.COMPUTING
            outputs = self._predict(batch)
            with self.changed:
                if batch.abandoned:
                    return  # Another thread has taken this one's place, and its slot.
                batch.stage = Stage.WAITING
                slots.release()
            if outputs is not None:
                queues.to_return.put((batch, outputs[0]))
            del batch, outputs  # They hold memory of the device.
        queues.to_compute.put(None)  # For the next of these threads.

    def _predict(self, batch: Batch) -> tuple[Any] | None:
        lane = batch.lane
        with as_part_of(batch.parts[0][0].session.step):
            try:
                model = lane.models.next()
            except BaseException as error:
                self._failed(batch, error, by_its_examples=False)
                return None
            batch.started, batch.started_ns = self.now(), lane.settings.clock.time_ns()
            try:
                return (lane.handler.predict(model, batch.inputs, lane.settings.inference_args),)
            except BaseException as error:
                self._failed(batch, error)
                return None

    def _hand_back(self, queues: _Queues) -> None:
        while (item := queues.to_return.get()) is not None:
            batch = item[0]
            with self.changed:
                if batch.abandoned:
                    continue
                batch.stage = Stage.RETURNING
            self._collect(*item)
            if batch.abandoned:
                return  # Another thread has taken this one's place.
            del batch, item

    def _collect(self, batch: Batch, outputs: Any) -> None:
        handler = batch.lane.handler
        try:
            with as_part_of(batch.parts[0][0].session.step):
                handler.wait(outputs)
                ready, ready_ns = self.now(), batch.lane.settings.clock.time_ns()
                values, model_id = as_block(handler.collect(outputs)), handler.model_id
            if len(values) != batch.count:
                raise ValueError(
                    f"{handler} returned {len(values)} predictions for {batch.count} examples; "
                    "it must return one for each, in their order"
                )
        except BaseException as error:
            self._failed(batch, error)
        else:
            self._succeeded(batch, values, model_id, ready, ready_ns)

    # What becomes of a batch.

    def _succeeded(self, batch: Batch, values: Any, model_id: str | None, ready: float, ready_ns: int) -> None:
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
                part = piece(values, done, done + len(places))
                done += len(places)
                submission.session.deliver(Outcome(submission.tag, places, part, None, model_id))
            self.wake()

    def _failed(self, batch: Batch, error: BaseException, by_its_examples: bool = True) -> None:
        lane = batch.lane
        too_large = by_its_examples and _made_room(error)
        with self.changed:
            if batch.abandoned:
                return
            batch.stats.failed, batch.stats.out_of_memory = True, too_large
            if too_large:
                lane.policy.budget.out_of_memory(batch.padded, batch.count)
            if batch.count > 1 and (too_large or (by_its_examples and lane.settings.isolate_failures)):
                lane.retries.extendleft(reversed(batch.halves()))
                self._end(batch)
            else:
                self._fail_examples(batch, error, batch.count if by_its_examples else 0)
            self.wake()

    def _abandon_overdue(self) -> bool:
        """Give up batches that took too long. Their threads can't be ended, only left alone."""
        overdue = [batch for batch in self._running if self._is_overdue(batch)]
        for batch in overdue:
            timeout, lane = batch.lane.settings.timeout, batch.lane
            batch.abandoned = batch.stats.failed = True
            error = TimeoutError(f"The model took longer than {timeout} seconds.")
            self._fail_examples(batch, error, batch.count)
            assert self._queues is not None
            assert timeout is not None
            if batch.stage is Stage.COMPUTING:
                lane.models.slots.release()
                self._spawn("compute", self._compute, self._queues)
            elif batch.stage is Stage.RETURNING:
                self._spawn("return", self._hand_back, self._queues)
            if lane.handler.should_garbage_collect_on_timeout():
                lane.models.retire(timeout)
                logging.getLogger(__name__).warning("A model took longer than %s seconds and is loaded anew.", timeout)
            self.wake()
        return bool(overdue)

    def _is_overdue(self, batch: Batch) -> bool:
        timeout = batch.lane.settings.timeout
        return timeout is not None and batch.due_from is not None and self.now() - batch.due_from >= timeout

    def _fail_examples(self, batch: Batch, error: BaseException, count: int) -> None:
        self._end(batch)
        for submission, places in batch.parts:
            failure = Outcome(submission.tag, places, None, error, None, count)
            submission.session.deliver(failure)

    def _end(self, batch: Batch) -> None:
        self._running.discard(batch)
        sessions = [submission.session for submission, _ in batch.parts]
        next((each for each in sessions if not each.closed), sessions[0]).count(batch.stats)


def _made_room(error: BaseException) -> bool:
    """Whether the batch was too large for the memory, which now has room for a smaller one."""
    try:
        if not is_out_of_memory(error):
            return False
        traceback.clear_frames(error.__traceback__)  # What the model had computed so far.
        release_memory()
    except Exception:
        # A device that can't even do this can do no smaller batch, either.
        logging.getLogger(__name__).exception("Could not make room after a batch that failed.")
        return False
    return True
