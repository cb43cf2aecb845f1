"""The batches under way: from the cut to the last outcome."""

from __future__ import annotations

from luminosity.inference.blocks import Block
from luminosity.inference.host.work import Batch, Outcome, Submitter

__all__ = ["InFlight"]


class InFlight:
    """Keeps the batches that device threads work on, and turns their ends into outcomes for sessions.

    It delivers nothing itself: methods return pairs of a session and an outcome, and the host delivers them. The
    caller holds the host's lock in every method.
    """

    def __init__(self) -> None:
        self.running: set[Batch] = set()
        self._ready_before = 0.0
        """When the last batch was computed; the device was busy until then."""

    def begin(self, batch: Batch, now: float) -> None:
        """Add a batch that was just cut."""
        self.running.add(batch)
        batch.begun = now
        batch.lane.model.users += 1

    def succeed(
        self, batch: Batch, values: Block, model_id: str | None, ready: float, ready_ns: int, now: float
    ) -> list[tuple[Submitter, Outcome]]:
        """End a batch whose predictions were ``ready`` at that time; learn its duration."""
        stats, lane = batch.stats, batch.lane
        stats.compute = ready - batch.started
        stats.busy = ready - max(batch.started, self._ready_before)
        stats.latency_micro_secs = (ready_ns - batch.started_ns) // 1000
        stats.collect = now - ready
        self._ready_before = ready
        lane.policy.budget.succeeded(batch.padded, max(stats.busy, 1e-9))
        lane.model.run_seconds += max(stats.busy, 0.0)
        self._end(batch, now)
        return batch.outcomes(values, model_id)

    def fail(
        self, batch: Batch, error: BaseException, now: float, *, too_large: bool, by_its_examples: bool
    ) -> list[tuple[Submitter, Outcome]]:
        """End a batch that failed.

        If the batch was too large for the memory, or its lane isolates failures, its halves go back to the lane and
        nothing is returned. Otherwise every example fails.
        """
        lane = batch.lane
        batch.stats.failed, batch.stats.out_of_memory = True, too_large
        self._count_failed_run(batch, now)
        if too_large:
            lane.policy.budget.out_of_memory(batch.padded, batch.count)
        self._end(batch, now)
        if batch.count > 1 and (too_large or (by_its_examples and lane.settings.isolate_failures)):
            lane.retry(batch.halves())
            return []
        return batch.failures(error, batch.count if by_its_examples else 0)

    def abandon(self, batch: Batch, error: BaseException, now: float) -> list[tuple[Submitter, Outcome]]:
        """Fail a batch that its thread still works on; the result of that thread will be ignored."""
        batch.abandoned = batch.stats.failed = True
        self._count_failed_run(batch, now)
        self._end(batch, now)
        return batch.failures(error, batch.count)

    def put_back(self, batch: Batch) -> None:
        """Return the examples to the front of their lane, as a new batch."""
        self.running.discard(batch)
        batch.lane.model.users -= 1
        batch.lane.retry([batch.again()])

    def _end(self, batch: Batch, now: float) -> None:
        self.running.remove(batch)
        batch.lane.model.users -= 1
        batch.lane.model.used_at = now
        batch.inputs = None

    def _count_failed_run(self, batch: Batch, now: float) -> None:
        """Count the time of a failed batch: a model that only fails has had its turn like any other."""
        batch.lane.model.run_seconds += now - (batch.started or batch.begun)
