"""What becomes of each batch: values, smaller batches, or a failure for each example."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from luminosity.inference.blocks import piece
from luminosity.inference.host.lane import Lane
from luminosity.inference.host.loader import drop
from luminosity.inference.host.work import Batch, BatchStats, Outcome
from luminosity.inference.memory import forget_frames, is_out_of_memory, release_memory

if TYPE_CHECKING:
    from luminosity.inference.host.host import ModelHost

__all__ = ["InFlight"]


class InFlight:
    """The batches under way. Guarded by the host's lock, which the public methods take, unless they say otherwise."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self.running: set[Batch] = set()
        self._ready_before = 0.0

    def begin(self, batch: Batch) -> None:
        """Under the lock."""
        self.running.add(batch)
        batch.begun = self._host.now()
        batch.lane.model.users += 1

    def abandon(self, batch: Batch, error: BaseException) -> None:
        """Whoever works on it is not waited for; under the lock."""
        batch.abandoned = batch.stats.failed = True
        self._count_failed_run(batch)
        self._fail_examples(batch, error, batch.count)

    def fail_all(self, lane: Lane, error: BaseException) -> None:
        """All that waits for a model that can't be had; under the lock."""
        for batch in lane.take_all(self._host.now()):
            batch.stats.failed = True
            self._fail_examples(batch, error, 0)
        self._host.wake()

    def succeeded(self, batch: Batch, values: Any, model_id: str | None, ready: float, ready_ns: int) -> None:
        stats, lane = batch.stats, batch.lane
        with self._host.changed:
            if batch.abandoned:
                return
            stats.compute = ready - batch.started
            stats.busy = ready - max(batch.started, self._ready_before)
            stats.latency_micro_secs = (ready_ns - batch.started_ns) // 1000
            stats.collect = self._host.now() - ready
            self._ready_before = ready
            lane.policy.budget.succeeded(batch.padded, max(stats.busy, 1e-9))
            lane.model.run_seconds += max(stats.busy, 0.0)
            self._end(batch)
            done = 0
            for submission, places in batch.parts:
                part = piece(values, done, done + len(places))
                done += len(places)
                submission.session.deliver(Outcome(submission.tag, places, part, None, model_id))
            self._host.wake()

    def failed(self, batch: Batch, error: BaseException, by_its_examples: bool = True) -> None:
        lane = batch.lane
        forget_frames(error)  # What the model had computed so far; and the model, which the error may outlive.
        too_large = by_its_examples and _made_room(error)
        if too_large and self._try_again_without_idle_models(batch):
            return
        with self._host.changed:
            if batch.abandoned:
                return
            batch.stats.failed, batch.stats.out_of_memory = True, too_large
            self._count_failed_run(batch)
            if too_large:
                lane.policy.budget.out_of_memory(batch.padded, batch.count)
            if batch.count > 1 and (too_large or (by_its_examples and lane.settings.isolate_failures)):
                lane.retries.extendleft(reversed(batch.halves()))
                self._end(batch)
            else:
                self._fail_examples(batch, error, batch.count if by_its_examples else 0)
            self._host.wake()

    def _try_again_without_idle_models(self, batch: Batch) -> bool:
        """Models that nobody needs now make room before batches are made smaller."""
        with self._host.changed:
            if self._host.roster.residency.budget is None or batch.abandoned:
                return False
            dropped = self._host.evict_one_idle()
            if not dropped:
                return False
            self._count(batch, replace(batch.stats, failed=True, out_of_memory=True))
        drop(dropped)
        self.put_back(batch)
        return True

    def put_back(self, batch: Batch) -> None:
        """The same examples, to be tried again. As another batch: the thread that has this one is not done with it."""
        with self._host.changed:
            if not batch.abandoned:
                self.running.discard(batch)
                batch.lane.model.users -= 1
                again = Batch(batch.lane, batch.parts, batch.longest, batch.useful, batch.budget, batch.waited)
                batch.lane.retries.appendleft(again)
                self._host.wake()

    def _fail_examples(self, batch: Batch, error: BaseException, count: int) -> None:
        self._end(batch)
        for submission, places in batch.parts:
            failure = Outcome(submission.tag, places, None, error, None, count)
            submission.session.deliver(failure)

    def _end(self, batch: Batch) -> None:
        if batch in self.running:
            self.running.discard(batch)
            batch.lane.model.users -= 1
            batch.lane.model.used_at = self._host.now()
            batch.inputs = None
        self._count(batch, batch.stats)

    def _count_failed_run(self, batch: Batch) -> None:
        """A model that only fails has had its turn like any other."""
        batch.lane.model.run_seconds += self._host.now() - (batch.started or batch.begun)

    def _count(self, batch: Batch, stats: BatchStats) -> None:
        sessions = [submission.session for submission, _ in batch.parts]
        next((each for each in sessions if not each.closed), sessions[0]).count(batch.lane, stats)


def _made_room(error: BaseException) -> bool:
    """Whether the batch was too large for the memory, which now has room for a smaller one."""
    try:
        if not is_out_of_memory(error):
            return False
        release_memory()
    except Exception:
        # A device that can't even do this can do no smaller batch, either.
        logging.getLogger(__name__).exception("Could not make room after a batch that failed.")
        return False
    return True
