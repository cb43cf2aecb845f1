"""The sources of simulated pipelines. All of them give the numbers of the scenario."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.transforms import window
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.utils.timestamp import MAX_TIMESTAMP, Duration, Timestamp

from tests.engine.simulated.steps import WORLD

__all__ = ["Emit", "Read", "Stream"]


class Emit(beam.DoFn):
    """Emits all numbers of the scenario."""

    def process(self, element: Any) -> Iterator[Any]:
        for number, at in WORLD.data:
            yield window.TimestampedValue(number, at)


class _Positions(RestrictionProvider):
    def initial_restriction(self, element: Any) -> OffsetRange:
        return OffsetRange(0, len(WORLD.data))

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: Any, restriction: OffsetRange) -> int:
        return restriction.size()


_POSITIONS_PARAM = beam.DoFn.RestrictionParam(_Positions())


class Read(beam.DoFn):
    """A bounded source: claims one number after the other."""

    def process(self, element: Any, tracker: Any = _POSITIONS_PARAM) -> Iterator[Any]:
        position = tracker.current_restriction().start
        while tracker.try_claim(position):
            WORLD.pause(0.001)
            number, at = WORLD.data[position]
            yield window.TimestampedValue(number, at)
            position += 1


class _EstimatorProvider(beam.transforms.core.WatermarkEstimatorProvider):
    def initial_estimator_state(self, element: Any, restriction: Any) -> Timestamp:
        return Timestamp(0)

    def create_watermark_estimator(self, state: Timestamp) -> ManualWatermarkEstimator:
        return ManualWatermarkEstimator(state)


_ESTIMATOR_PARAM = beam.DoFn.WatermarkEstimatorParam(_EstimatorProvider())


class Stream(beam.DoFn):
    """A source without a known end: it gives itself back every few numbers, with its watermark."""

    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        element: Any,
        tracker: Any = _POSITIONS_PARAM,
        estimator: Any = _ESTIMATOR_PARAM,
    ) -> Iterator[Any]:
        position = tracker.current_restriction().start
        read = 0
        while tracker.try_claim(position):
            WORLD.pause(0.001)
            number, at = WORLD.data[position]
            yield window.TimestampedValue(number, at)
            position += 1
            read += 1
            left = [at for _, at in WORLD.data[position:]]
            if left and Timestamp(min(left)) > estimator.current_watermark():
                estimator.set_watermark(Timestamp(min(left)))
            if read == 5 and left:
                tracker.defer_remainder(Duration(micros=200_000))
                return
        if position >= len(WORLD.data):
            estimator.set_watermark(MAX_TIMESTAMP)
