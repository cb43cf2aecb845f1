"""One bundle's conversation with the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from luminosity.inference.blocks import Block, size
from luminosity.inference.host.lane import Lane
from luminosity.inference.host.work import BatchStats, Outcome, Submission

if TYPE_CHECKING:
    from luminosity.inference.host.host import ModelHost

__all__ = ["Session"]


class Session:
    """Belongs to one thread, and may use any number of lanes.

    Handing over may wait for room; outcomes come in any order.
    """

    def __init__(self, host: ModelHost, step: Any = None) -> None:
        self.step = step
        """To which what the model's own code counts and logs belongs."""
        self._host = host
        self._pending = 0
        self._outcomes: list[Outcome] = []
        self._stats: dict[Lane, list[BatchStats]] = {}
        self._lanes: set[Lane] = set()
        self._producing: set[Lane] = set()
        self.closed = False
        self.waiting = False
        """Whether it can do nothing before the host does."""

    def submit(self, lane: Lane, prepared: Block, costs: Any, tag: Any, weights: Any = None) -> None:
        """Hand over a block; ``costs`` of its examples, and weights where the handler limits those."""
        host = self._host
        submission = Submission(self, prepared, tag, len(prepared), size(prepared))
        with host.changed:
            self._lanes.add(lane)
            if not lane.has_room():
                self._wait_until(lane.has_room)
            for each in self._lanes - self._producing:
                each.producing += 1
            self._producing = set(self._lanes)
            self._pending += len(prepared)
            lane.add(submission, costs, weights, host.now())
            host.wake()

    def ready(self) -> list[Outcome]:
        """What is there, without waiting."""
        with self._host.changed:
            outcomes, self._outcomes = self._outcomes, []
            return outcomes

    def finish(self) -> Iterator[list[Outcome]]:
        """Everything that is still to come, as it comes."""
        while True:
            with self._host.changed:
                self._wait_until(lambda: bool(self._outcomes) or not self._pending)
                outcomes, self._outcomes = self._outcomes, []
                done = not self._pending
            yield outcomes
            if done:
                return

    def take_stats(self) -> dict[Lane, list[BatchStats]]:
        with self._host.changed:
            stats, self._stats = self._stats, {}
            return stats

    def close(self) -> None:
        """Leave; what is not yet computed is forgotten."""
        with self._host.changed:
            self._pause()
            self.closed = True
            for lane in self._lanes:
                lane.drop(self)
            self._host.wake()

    def deliver(self, outcome: Outcome) -> None:
        """Called by the host, under its lock."""
        self._pending -= len(outcome.places)
        if not self.closed:
            self._outcomes.append(outcome)

    def count(self, lane: Lane, stats: BatchStats) -> None:
        """Called by the host, under its lock."""
        self._stats.setdefault(lane, []).append(stats)

    def moved(self, old: Lane, new: Lane) -> None:
        """Called by the host, under its lock: what this session handed over to one lane is in another now."""
        self._lanes.add(new)
        if old in self._producing and new not in self._producing:
            self._producing.add(new)
            new.producing += 1

    def _wait_until(self, true: Callable[[], bool]) -> None:
        self._pause()
        self.waiting = True
        self._host.wake()
        try:
            self._host.wait_until(true, self._lanes)
        finally:
            self.waiting = False

    def _pause(self) -> None:
        """Nothing more comes before the host has answered: no lane need wait for it."""
        for lane in self._producing:
            lane.producing -= 1
        self._producing = set()
