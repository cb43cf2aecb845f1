"""The model host: who waits for which model, and what becomes of each batch."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from typing import Any

from luminosity.inference.blocks import piece
from luminosity.inference.handler import Handler
from luminosity.inference.host.crew import Crew
from luminosity.inference.host.lane import Lane, LaneSettings
from luminosity.inference.host.models import LoadedModels
from luminosity.inference.host.session import Session
from luminosity.inference.host.work import Batch, Outcome
from luminosity.inference.memory_errors import is_out_of_memory, release_memory

__all__ = ["ModelHost"]

_IDLE_S = 60.0
"""How long a model that nobody uses is kept, and threads that have nothing to do."""
_LOOK_AGAIN_S = 1.0


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
        self._crew: Crew | None = None
        """None while there is nothing to do."""
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
            assert len(self._running) <= (self._crew.computers if self._crew else 0) + 4, "batches that nobody computes"

    def _models(self, settings: LaneSettings) -> LoadedModels | None:
        """Those of another lane that names the same model."""
        same = (lane.models for lane in self._lanes.values() if lane.settings.model == settings.model)
        return None if settings.model is None else next(same, None)

    # What there is to do.

    def _start(self) -> None:
        if self._crew is None:
            self._crew = Crew(self)
        self._crew.grow_to(max(lane.models.concurrency for lane in self._lanes.values()))

    def next_batch(self) -> Batch | None:
        """Wait for the next batch, whatever lane it is of; None when nobody needs this crew any more."""
        with self.changed:
            while True:
                shortest = self._forget_unused()
                if not self._lanes and not self._running:
                    self._crew = None
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

    # What becomes of a batch.

    def succeeded(self, batch: Batch, values: Any, model_id: str | None, ready: float, ready_ns: int) -> None:
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

    def failed(self, batch: Batch, error: BaseException, by_its_examples: bool = True) -> None:
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
            assert self._crew is not None
            assert timeout is not None
            self._crew.replace_thread_of(batch)
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
