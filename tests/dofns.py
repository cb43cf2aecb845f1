"""Steps that show whether every element was processed exactly once, and where."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.transforms.userstate import CombiningValueStateSpec

from luminosity.core import WorkerShare
from tests.marks import meet


class Ranges(beam.RestrictionProvider):
    """An element (start, stop) is a range of numbers."""

    def initial_restriction(self, element: tuple[int, int]) -> OffsetRange:
        return OffsetRange(*element)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: tuple[int, int], restriction: OffsetRange) -> int:
        return restriction.size()


_SEEN = beam.DoFn.StateParam(CombiningValueStateSpec("seen", sum))
_RANGE = beam.DoFn.RestrictionParam(Ranges())


class Numbers(beam.DoFn):
    """A splittable source of the numbers of a range, slow enough to be hit while it works."""

    def __init__(self, seconds_each: float) -> None:
        self._seconds_each = seconds_each

    def process(self, element: tuple[int, int], tracker: Any = _RANGE) -> Iterator[int]:
        number = tracker.current_restriction().start
        while tracker.try_claim(number):
            time.sleep(self._seconds_each)
            yield number
            number += 1


class Counted(beam.DoFn):
    """Numbers the elements of each key: a lost element leaves a gap, a repeated one a double."""

    def process(self, element: tuple[int, int], seen: Any = _SEEN) -> Iterable[tuple[int, int]]:
        seen.add(1)
        yield element[0], seen.read()


@dataclass(frozen=True)
class Sighting:
    """Where and when a step handled an element."""

    step: str
    pid: int
    visible_devices: str | None
    share: WorkerShare
    start_s: float
    end_s: float


def look(element: Any, step: str, seconds: float = 0.0, meeting: tuple[Path, int] | None = None) -> Any:
    """A step that takes some time and tells where it ran, as a `Sighting`.

    `meeting`: no element is done before so many are in hand; the path is that of a file for `meet`.
    """
    # Of the machine, not of the process: the times of different processes can be compared.
    start_s = time.monotonic()
    if meeting is not None:
        meet(*meeting)
    time.sleep(seconds)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Sighting(step, os.getpid(), visible, WorkerShare.current(), start_s, time.monotonic())
