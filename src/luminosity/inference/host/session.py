"""A session: one bundle's connection to a model host in the same process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

from luminosity._shared.hangs import Wait, waiting_for
from luminosity.inference.batching import QueuedExamples
from luminosity.inference.blocks import Block, size
from luminosity.inference.host.interface import BatchStats, Outcome
from luminosity.inference.host.lane import Lane, Submission

__all__ = ["DescribeWait", "Session", "WaitUntil"]

DescribeWait: TypeAlias = Callable[[Collection[Lane]], Wait]
"""Tells how the host does with these lanes, to another thread than the session's."""
WaitUntil: TypeAlias = Callable[[Callable[[], bool], Collection[Lane]], None]
"""Blocks until the condition holds, watching the timeouts of these lanes. The caller holds the lock."""


class Session:
    """Submits blocks to any number of lanes and collects their outcomes, which come in any order.

    A session belongs to one thread, which calls the methods without the lock, except those that say otherwise. The
    lock is the host's and protects the session's state, because device threads deliver into it.
    """

    def __init__(
        self,
        lock: threading.Condition,
        now: Callable[[], float],
        wait_until: WaitUntil,
        describe_wait: DescribeWait,
        step: Any = None,
    ) -> None:
        """``step``: the Beam step that the model's own metrics and logs belong to."""
        self._describe_wait = describe_wait
        self.step = step
        self.closed = False
        self.waiting = False
        """Whether the session's thread is blocked until the host makes progress."""
        self._lock = lock
        self._now = now
        self._wait_for_host = wait_until
        self._pending = 0
        self._outcomes: list[Outcome] = []
        self._stats: dict[Lane, list[BatchStats]] = {}
        self._lanes: set[Lane] = set()
        self._choosy: set[Lane] = set()
        """Lanes whose batches have a least size."""
        self._producing: set[Lane] = set()

    def submit(self, lane: Lane, prepared: Block, costs: Any, tag: Any, weights: Any = None) -> None:
        """Add a block to a lane; block while the lane is full.

        Args:
            lane: the lane to add to.
            prepared: the prepared examples.
            costs: the cost of each example.
            tag: any value; it comes back with the outcomes.
            weights: the weight of each example, if the handler limits the weight of a batch.
        """
        submission = Submission(self, prepared, tag, len(prepared), size(prepared))
        with self._lock:
            self._use(lane)
            if not lane.has_room():
                self._wait_until(lane.has_room)
            self._resume(lane)
            self._pending += len(prepared)
            lane.receive(submission, QueuedExamples.new(costs, weights, self._now()))
            self._lock.notify_all()

    def ready(self) -> list[Outcome]:
        """Return the outcomes that have arrived, without blocking."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
            return outcomes

    def finish(self) -> Iterator[list[Outcome]]:
        """Yield all remaining outcomes as they arrive."""
        while True:
            with self._lock:
                self._wait_until(lambda: bool(self._outcomes) or not self._pending)
                outcomes, self._outcomes = self._outcomes, []
                done = not self._pending
            yield outcomes
            if done:
                return

    def take_stats(self) -> dict[Lane, list[BatchStats]]:
        """Return the statistics of this session's batches since the last call, by lane."""
        with self._lock:
            stats, self._stats = self._stats, {}
            return stats

    def close(self) -> None:
        """Close the session and discard its examples that are not yet computed."""
        with self._lock:
            self._pause()
            self.closed = True
            for lane in self._lanes:
                lane.drop(self)
            self._lock.notify_all()

    def deliver(self, outcome: Outcome) -> None:
        """Take an outcome. The host calls this and holds the lock."""
        self._pending -= len(outcome.places)
        if not self.closed:
            self._outcomes.append(outcome)

    def count(self, lane: Lane, stats: BatchStats) -> None:
        """Record a batch. The host calls this and holds the lock."""
        self._stats.setdefault(lane, []).append(stats)

    def moved(self, old: Lane, new: Lane) -> None:
        """Note that examples of this session moved to another lane. The host calls this and holds the lock."""
        self._use(new)
        if old in self._producing and new not in self._producing:
            self._producing.add(new)
            new.producing += 1

    def _use(self, lane: Lane) -> None:
        self._lanes.add(lane)
        if lane.policy.limits.min_count > 1:
            self._choosy.add(lane)

    def _resume(self, lane: Lane) -> None:
        """Tell the lanes that this session may add more; after a pause all of them, otherwise only the new one."""
        for each in [lane] if self._producing else self._lanes:
            if each not in self._producing:
                self._producing.add(each)
                each.producing += 1

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        self._pause()
        self.waiting = True
        for lane in self._choosy:
            lane.changed(lane)  # A batch that is smaller than the author wants must go now.
        self._lock.notify_all()
        try:
            with waiting_for(lambda: self._describe_wait(self._lanes)):
                self._wait_for_host(condition, self._lanes)
        finally:
            self.waiting = False

    def _pause(self) -> None:
        """Tell the lanes that this session adds nothing before the host has made progress."""
        for lane in self._producing:
            lane.end_producing()
        self._producing = set()
