"""One bundle's conversation with the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from luminosity.inference.blocks import Block, size
from luminosity.inference.host.lane import Lane
from luminosity.inference.host.work import BatchStats, Outcome, Submission

if TYPE_CHECKING:
    from luminosity.inference.host.host import ModelHost

__all__ = ["Session"]


class Session:
    """Belongs to one thread. Handing over may wait for room; outcomes come in any order."""

    def __init__(self, host: ModelHost, lane: Lane, step: Any = None) -> None:
        self.lane = lane
        self.step = step
        """To which what the model's own code counts and logs belongs."""
        self._host = host
        self._pending = 0
        self._outcomes: list[Outcome] = []
        self._stats: list[BatchStats] = []
        self._producing = False
        self._closed = False
        self._resume()

    def submit(self, prepared: Block, costs: Any, tag: Any, weights: Any = None) -> None:
        """Hand over a block; ``costs`` of its examples, and weights where the handler limits those."""
        host = self._host
        with host.changed:
            if not self.lane.has_room():
                self._pause()
                host.wait_until(self.lane.has_room, self.lane)
            self._resume()
            submission = Submission(self, prepared, tag, len(prepared), size(prepared))
            self._pending += len(prepared)
            self.lane.add(submission, costs, weights, host.now())
            host.wake()

    def ready(self) -> list[Outcome]:
        """What is there, without waiting."""
        with self._host.changed:
            outcomes, self._outcomes = self._outcomes, []
            return outcomes

    def finish(self) -> Iterator[list[Outcome]]:
        """Everything that is still to come, as it comes."""
        host = self._host
        while True:
            with host.changed:
                self._pause()
                host.wake()
                host.wait_until(lambda: bool(self._outcomes) or not self._pending, self.lane)
                outcomes, self._outcomes = self._outcomes, []
                done = not self._pending
            yield outcomes
            if done:
                return

    def settle(self) -> None:
        """Wait until nothing of this session is under way; its outcomes stay to be fetched."""
        host = self._host
        with host.changed:
            self._pause()
            host.wake()
            host.wait_until(lambda: not self._pending, self.lane)

    def take_stats(self) -> list[BatchStats]:
        with self._host.changed:
            stats, self._stats = self._stats, []
            return stats

    def close(self) -> None:
        """Leave; what is not yet computed is forgotten."""
        with self._host.changed:
            self._pause()
            self._closed = True
            self.lane.drop(self)
            self._host.wake()

    def deliver(self, outcome: Outcome) -> None:
        """Called by the host, under its lock."""
        self._pending -= len(outcome.places)
        if not self._closed:
            self._outcomes.append(outcome)

    def count(self, stats: BatchStats) -> None:
        """Called by the host, under its lock."""
        self._stats.append(stats)

    def _resume(self) -> None:
        if not self._producing:
            self._producing = True
            self.lane.producing += 1

    def _pause(self) -> None:
        if self._producing:
            self._producing = False
            self.lane.producing -= 1
