"""What one reader reads: offsets of a group of partitions, claimed exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from apache_beam.io.iobase import RestrictionProgress, RestrictionTracker

from luminosity.errors import InvalidArgument
from luminosity.io.kafka.reading.positions import Partition

__all__ = ["LAST", "Claim", "GroupTracker", "PartitionGroup", "Span"]


class Span(NamedTuple):
    """Offsets of one partition that are to be read: from ``start`` up to ``stop``, without ``stop`` itself.

    ``stop`` is None if there is no end. ``end`` is the end of the partition when it was last looked at, which only
    says how much waits there.
    """

    start: int
    stop: int | None = None
    end: int = 0

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to read."""
        return self.stop is not None and self.start >= self.stop

    @property
    def backlog(self) -> int:
        """How many offsets wait in the partition, as far as known; a span with a stop counts up to that."""
        return max(0, (self.end if self.stop is None else self.stop) - self.start)


class PartitionGroup(NamedTuple):
    """The restriction: the spans of some partitions.

    ``is_open`` says that partitions may be added and that the group is never done, even if it has none yet.
    ``looked_at`` is when it was last looked for new ones, in seconds since 1970.
    """

    spans: Mapping[Partition, Span]
    is_open: bool = False
    looked_at: float = 0.0

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to read and no partition can be added."""
        return not self.is_open and all(span.is_done for span in self.spans.values())

    @property
    def backlog(self) -> int:
        """How many offsets wait, as far as known."""
        return sum(span.backlog for span in self.spans.values())


class Claim(NamedTuple):
    """What a reader asks of its tracker.

    ``positions`` are the next offsets after the records that it is about to emit; ``found`` are new partitions;
    ``stops`` are ends for all partitions, after which none is added; ``ends`` are the ends of partitions as the broker
    reports them; ``looked_at`` is when it was looked for new partitions. A claim with none of these asks whether to go
    on.
    """

    positions: Mapping[Partition, int] = {}
    found: Mapping[Partition, Span] = {}
    stops: Mapping[Partition, int] | None = None
    ends: Mapping[Partition, int] = {}
    looked_at: float | None = None


LAST = Claim()
"""Announces that the reader calls ``defer_remainder`` next. It is recognised by identity."""


class GroupTracker(RestrictionTracker):
    """Tracks which offsets of a group are claimed.

    Records of a partition stay in order on every runner: what is left of a group may run only after the bundle that
    read its beginning is committed. A rest that the reader itself defers is part of the bundle's response, so that
    holds. A rest that a runner takes away may run at once. So a request to split is refused, and the next claim fails:
    then the reader defers the rest itself.

    >>> tracker = GroupTracker(PartitionGroup({("reviews", 0): Span(5, 9)}))
    >>> tracker.try_claim(Claim({("reviews", 0): 7})), tracker.try_split(0.5)
    (True, None)
    >>> tracker.try_claim(Claim({("reviews", 0): 8})), tracker.try_claim(LAST)
    (False, True)
    >>> claimed, rest = tracker.try_split(0)
    >>> claimed.spans[("reviews", 0)][:2], rest.spans[("reviews", 0)][:2]
    ((5, 7), (7, 9))
    """

    def __init__(self, group: PartitionGroup) -> None:
        self._looked_at = group.looked_at
        self._spans = dict(group.spans)
        self._is_open = group.is_open
        self._began = {partition: span.start for partition, span in group.spans.items()}
        self._should_stop = False
        self._may_split = False
        self._has_split = False

    def current_restriction(self) -> PartitionGroup:
        """Return what is left to read, or, after a split, what was claimed."""
        if self._has_split:
            return self._claimed()
        return PartitionGroup(dict(self._spans), self._is_open, self._looked_at)

    def try_claim(self, position: Claim) -> bool:
        """Claim offsets, or add partitions. Returns False if the reader has to defer the rest.

        Then nothing is claimed or added; only ``ends`` are noted.
        """
        if self._has_split:
            return False
        if position is LAST:
            self._may_split = True
            return True
        for partition, end in position.ends.items():
            if partition in self._spans:
                self._spans[partition] = self._spans[partition]._replace(end=end)
        if self._should_stop:
            return False
        for partition, offset in position.positions.items():
            span = self._spans[partition]
            if offset < span.start or (span.stop is not None and offset > span.stop):
                raise InvalidArgument(
                    f"found a claim of {partition[0]}[{partition[1]}] up to offset {offset}, expected one from "
                    f"{span.start} to {span.stop}"
                )
            self._spans[partition] = span._replace(start=offset)
        for partition, span in position.found.items():
            if partition not in self._spans:
                self._spans[partition] = span
                self._began[partition] = span.start
        if position.stops is not None:
            for partition, span in self._spans.items():
                self._spans[partition] = span._replace(stop=max(span.start, position.stops.get(partition, span.start)))
            self._is_open = False
        if position.looked_at is not None:
            self._looked_at = position.looked_at
        return True

    def try_split(self, fraction_of_remainder: float) -> tuple[PartitionGroup, PartitionGroup] | None:
        """Divide the group at what is claimed, if the reader has said that it stops; otherwise ask it to stop."""
        del fraction_of_remainder
        if self._has_split:
            return None
        if not self._may_split:
            self._should_stop = True
            return None
        rest = PartitionGroup({p: s for p, s in self._spans.items() if not s.is_done}, self._is_open, self._looked_at)
        if rest.is_done:
            return None
        self._has_split = True
        return self._claimed(), rest

    def _claimed(self) -> PartitionGroup:
        return PartitionGroup({p: Span(self._began[p], s.start, s.start) for p, s in self._spans.items()})

    def check_done(self) -> bool:
        """Raise if offsets are left that were neither claimed nor deferred."""
        if not self._has_split and not PartitionGroup(self._spans, self._is_open).is_done:
            raise ValueError(f"found offsets that were not claimed in {self._spans}")
        return True

    def current_progress(self) -> RestrictionProgress:
        """Return how many offsets are claimed and how many wait.

        A group that is not done has always one left: Beam does not ask a reader to split that has nothing left, and
        one that keeps up with its topic would not end its bundle.
        """
        claimed = sum(span.start - self._began[partition] for partition, span in self._spans.items())
        waiting = 0 if self._has_split else sum(span.backlog for span in self._spans.values())
        if not waiting and not self._has_split and not PartitionGroup(self._spans, self._is_open).is_done:
            waiting = 1
        return RestrictionProgress(completed=float(claimed), remaining=float(waiting))

    def is_bounded(self) -> bool:
        """Return whether every partition has an end."""
        return not self._is_open and all(span.stop is not None for span in self._spans.values())
