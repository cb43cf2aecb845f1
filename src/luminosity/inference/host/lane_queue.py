"""Chooses the lane that gets the next batch, without looking at lanes in which nothing has changed."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict

from luminosity.inference.host.lane import Lane
from luminosity.inference.host.work import Batch

__all__ = ["LaneQueue"]

_LOOK_WHEN_IDLE = 16  # lanes that wait for more examples; an idle device may take one of them earlier


class LaneQueue:
    """The lanes that may have a batch, in the order in which they get one.

    A host may have thousands of lanes, one for each key. So a lane is looked at only after a change: it has new
    examples, its model has arrived, or a session has stopped to submit. A lane that waits for more examples is looked
    at again when its wait is over.

    The caller holds the host's lock in every method.
    """

    def __init__(self) -> None:
        self._changed: OrderedDict[Lane, None] = OrderedDict()
        self._lingering: list[tuple[float, int, Lane]] = []
        """A heap of the lanes that wait for more examples, by the end of their wait; some entries are out of date."""
        self._ends: dict[Lane, float] = {}
        """The end of the wait of each lane that waits."""
        self._numbers = itertools.count()

    def add(self, lane: Lane) -> None:
        """Look at a lane again, after the lanes that are already here."""
        self._changed.setdefault(lane)

    def next(self, now: float, is_idle: bool) -> Batch | float:
        """Return the next batch, or the seconds until there may be one; infinite if that needs a change.

        ``is_idle``: whether the device has nothing to do.
        """
        while self._changed:
            lane, _ = self._changed.popitem(last=False)
            batch = self._look_at(lane, now, is_idle)
            if batch is not None:
                return batch
        looked = self._due(now, _LOOK_WHEN_IDLE if is_idle else 0)
        for lane in looked:
            batch = self._look_at(lane, now, is_idle)
            if batch is not None:
                for other in looked[looked.index(lane) + 1 :]:
                    self.add(other)
                return batch
        self._skip_outdated()
        return self._lingering[0][0] - now if self._lingering else math.inf

    def _look_at(self, lane: Lane, now: float, is_idle: bool) -> Batch | None:
        self._ends.pop(lane, None)
        if not lane.model.is_ready or lane.model.is_leaving or not lane.has_work():
            return None  # The host adds the lane again when this changes.
        found = lane.next(now, is_idle)
        if isinstance(found, Batch):
            self.add(lane)  # Next time the other lanes come first.
            return found
        if found is not None:
            self._ends[lane] = now + found
            heapq.heappush(self._lingering, (now + found, next(self._numbers), lane))
        return None

    def _due(self, now: float, at_least: int) -> list[Lane]:
        """Remove and return the lanes whose wait is over, and further ones up to this number."""
        due: list[Lane] = []
        self._skip_outdated()
        while self._lingering and (self._lingering[0][0] <= now or len(due) < at_least):
            lane = heapq.heappop(self._lingering)[2]
            del self._ends[lane]
            due.append(lane)
            self._skip_outdated()
        return due

    def _skip_outdated(self) -> None:
        """Remove entries of lanes that were looked at since."""
        while self._lingering and self._ends.get(self._lingering[0][2]) != self._lingering[0][0]:
            heapq.heappop(self._lingering)
