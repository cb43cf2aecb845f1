"""The step that follows a table: it looks for new versions again and again, and emits their parts, each once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Duration, Timestamp

from luminosity.errors import TableError
from luminosity.io.endless import EndlessTracker
from luminosity.io.outage import OutageLog
from luminosity.io.reading.named_table import FollowedTable, NewVersion

__all__ = ["FollowVersions", "Seen", "SeenTracker"]

_BEHIND_S = 5  # how far the watermark stays behind the clock: versions have the times of their writers' clocks
_LONGEST_OUTAGE_S = 300.0  # after which the run fails, as with other sources


class Seen(NamedTuple):
    """The restriction: the last version whose parts are emitted. ``has_begun`` tells None from the beginning."""

    version: int | None
    has_begun: bool = False


class SeenTracker(EndlessTracker):
    """Tracks the versions that are read. A table that is followed has no end, so something is always left.

    >>> tracker = SeenTracker(Seen(3, True))
    >>> tracker.try_claim(Seen(4, True)), tracker.try_split(0)
    (True, (Seen(version=3, has_begun=True), Seen(version=4, has_begun=True)))
    >>> tracker.try_claim(Seen(5, True)), tracker.check_done()
    (False, True)
    """

    def __init__(self, seen: Seen) -> None:
        self._began = self._reached = seen

    def current_restriction(self) -> Seen:
        """Return how far the table is read."""
        return self._reached

    def try_claim(self, position: Seen) -> bool:
        """Return whether the parts of this version are the caller's to emit."""
        if self._has_split:
            return False
        self._reached = position
        return True

    def try_split(self, fraction_of_remainder: float) -> tuple[Seen, Seen] | None:
        """Hand over the versions that are not claimed yet."""
        del fraction_of_remainder
        if self._has_split:
            return None
        self._has_split = True
        return self._began, self._reached


_SEEN = beam.DoFn.RestrictionParam()  # The DoFn itself is the provider.
_WATERMARK = beam.DoFn.WatermarkEstimatorParam(ManualWatermarkEstimator.default_provider())


class FollowVersions(beam.DoFn, beam.RestrictionProvider):
    """Emits the parts of a table, then those of each new version, with the time of its commit.

    What is emitted and how far the table is read are committed together, so a bundle that is run again loses no
    version and repeats none. Parts are never late: a version whose time is before the watermark gets the watermark.
    """

    def __init__(self, table: FollowedTable, where: Any, poll_s: float) -> None:
        self._table = table
        self._where = where
        self._poll_s = poll_s
        self._outage: OutageLog | None = None

    def setup(self) -> None:
        """Count outages anew in each process."""
        self._outage = OutageLog(self._table.name, "reading")

    def initial_restriction(self, element: NewVersion) -> Seen:
        """Return the beginning."""
        return Seen(None)

    def create_tracker(self, restriction: Seen) -> SeenTracker:
        """Return a tracker of the versions."""
        return SeenTracker(restriction)

    def restriction_size(self, element: NewVersion, restriction: Seen) -> int:
        """Return 1: what comes is not known."""
        return 1

    @beam.DoFn.unbounded_per_element()
    def process(self, element: NewVersion, tracker: Any = _SEEN, watermark: Any = _WATERMARK) -> Iterator[Any]:
        """Emit what is new, and look again after a while. ``element`` is the version to begin with."""
        seen = tracker.current_restriction()
        looked_at = time.time()
        for each in self._newer(seen.version) if seen.has_begun else [element]:
            if not tracker.try_claim(Seen(each.version, has_begun=True)):
                return
            reached = max(Timestamp(micros=each.micros), watermark.current_watermark() or MIN_TIMESTAMP)
            for part in each.parts:
                yield TimestampedValue(part, reached)
            watermark.set_watermark(reached)
            if each is not element:
                Metrics.counter(self._table.kind, "versions_read").inc()
        if self._outage is None or self._outage.since is None:  # else versions may be there that were not seen
            idle = Timestamp.of(looked_at - _BEHIND_S)
            watermark.set_watermark(max(idle, watermark.current_watermark() or MIN_TIMESTAMP))
        tracker.defer_remainder(Duration.of(self._poll_s))

    def _newer(self, version: int | None) -> list[NewVersion]:
        """Return the newer versions; none while the table can't be reached, for at most some minutes."""
        assert self._outage is not None
        try:
            found = self._table.newer(version, self._where)
        except TableError as error:
            if not error.may_pass or self._outage.seconds() > _LONGEST_OUTAGE_S:
                raise
            self._outage.note_silence(str(error))
            return []
        self._outage.note_answer()
        return found
