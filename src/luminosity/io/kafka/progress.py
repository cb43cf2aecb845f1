"""How far a group of partitions is read: the offsets, claimed exactly once, the event times and the watermark."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timezone
from typing import Any, NamedTuple

from apache_beam.io.iobase import RestrictionProgress, RestrictionTracker, WatermarkEstimator
from apache_beam.transforms.core import WatermarkEstimatorProvider
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp

from luminosity._shared.text import shorten_repr
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.io.kafka.record import KafkaRecord, Partition

__all__ = [
    "LAST",
    "Claim",
    "GroupTracker",
    "GroupWatermark",
    "GroupWatermarks",
    "PartitionGroup",
    "Span",
    "TimestampPolicy",
]


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


_MIN_MICROS = MIN_TIMESTAMP.micros
_MAX_MICROS = GlobalWindow().max_timestamp().micros
_MOST_SECONDS = 1e13  # beyond the times that elements can have; also false for NaN
_NAMES = ("record", "log_append", "processing")


class TimestampPolicy(NamedTuple):
    """Says which event time a record gets, and what that tells about the records to come.

    Args:
        kind: ``"record"``, ``"log_append"``, ``"processing"`` or ``"function"``.
        delay_micros: how much later than others a record may come.
        function: the event time of a record, if ``kind`` is ``"function"``.
    """

    kind: str
    delay_micros: int
    function: Callable[[KafkaRecord], Any] | None = None

    @classmethod
    def of(cls, timestamps: Any, max_out_of_orderness: float) -> TimestampPolicy:
        """Return the policy that the arguments describe.

        >>> TimestampPolicy.of("record", 2.5).delay_micros
        2500000
        >>> TimestampPolicy.of("broker", 0)
        Traceback (most recent call last):
        luminosity.errors.InvalidArgument: found timestamps='broker', expected 'record', 'log_append', 'processing' ...
        """
        if isinstance(max_out_of_orderness, bool) or not 0 <= max_out_of_orderness < float("inf"):
            raise InvalidArgument(f"found max_out_of_orderness={max_out_of_orderness!r}, expected seconds, 0 or more")
        delay = round(max_out_of_orderness * 1e6)
        if callable(timestamps):
            return cls("function", delay, timestamps)
        if timestamps not in _NAMES:
            raise InvalidArgument(
                f"found timestamps={shorten_repr(timestamps, 80)}, expected {', '.join(map(repr, _NAMES))} or a "
                "function of a KafkaRecord"
            )
        return cls(timestamps, delay)

    def micros(self, record: KafkaRecord, now_micros: int) -> int:
        """Return the event time of a record. One without a timestamp has the time at which it is read."""
        if self.function is not None:
            return _to_micros(self.function(record))
        if self.kind == "processing" or record.timestamp == -1:
            return now_micros
        return _bounded(record.timestamp * 1000)

    def watermark_after(self, newest_micros: int, now_micros: int) -> int:
        """Return the time before which no more records come, after one with the time ``newest_micros``.

        A record from the future does not move it beyond the clock.
        """
        if self.kind == "processing":
            return now_micros
        delay = 0 if self.kind == "log_append" else self.delay_micros  # a broker appends in the order of its clock
        return min(newest_micros, now_micros) - delay

    def watermark_when_idle(self, checked_micros: int) -> int:
        """Return the same for a partition of which all records were read when it was checked."""
        return checked_micros if self.kind == "processing" else checked_micros - self.delay_micros


def _to_micros(value: Any) -> int:
    """Return what a function of the user says. Raises ``InvalidType`` for what is no time that an element can have.

    >>> _to_micros(1.5)
    1500000
    >>> _to_micros(float("nan"))
    Traceback (most recent call last):
    luminosity.errors.InvalidType: found nan from the function timestamps=, expected seconds since 1970, a datetime ...
    """
    micros: int | None = None
    if isinstance(value, Timestamp):
        micros = value.micros
    elif isinstance(value, datetime) and value.tzinfo is not None:
        micros = Timestamp.from_utc_datetime(value.astimezone(timezone.utc)).micros
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MOST_SECONDS:
        micros = round(value * 1e6)
    if micros is None or not _MIN_MICROS <= micros <= _MAX_MICROS:
        raise InvalidType(
            f"found {shorten_repr(value, 80)} from the function timestamps=, expected seconds since 1970, a datetime "
            "with a time zone or a Beam Timestamp, within the times that elements can have"
        )
    return micros


def _bounded(micros: int) -> int:
    """Return the time, or the nearest that an element can have: Kafka stores any 64 bits."""
    return max(_MIN_MICROS, min(micros, _MAX_MICROS))


class GroupWatermark(WatermarkEstimator):
    """The watermark of a group: the earliest of its partitions'. It never moves back.

    A partition of which nothing is known holds it. The state travels with the rest of the group, so that a partition
    that was far behind still is after a checkpoint.

    >>> watermark = GroupWatermark((0, {}))
    >>> watermark.expect([("reviews", 0), ("reviews", 1)])
    >>> watermark.move(("reviews", 0), 7_000_000)
    >>> watermark.current_watermark()
    Timestamp(0)
    >>> watermark.move(("reviews", 1), 5_000_000)
    >>> watermark.current_watermark()
    Timestamp(5)
    """

    def __init__(self, state: tuple[int, dict[Partition, int]]) -> None:
        self._reached, known = state
        self._partitions = dict(known)

    def observe_timestamp(self, timestamp: Timestamp) -> None:
        """Do nothing: :meth:`move` gets the times of many records at once."""

    def expect(self, partitions: Iterable[Partition], reached: int | None = None) -> None:
        """Take partitions into the group, which hold the watermark at ``reached`` until more is known of them."""
        for partition in partitions:
            self._partitions.setdefault(partition, _MIN_MICROS if reached is None else reached)

    def move(self, partition: Partition, micros: int) -> None:
        """Move the watermark of one partition forward."""
        if micros > self._partitions.get(partition, _MIN_MICROS):
            self._partitions[partition] = _bounded(micros)

    def move_empty(self, micros: int) -> None:
        """Move the watermark of a group that has no partitions."""
        if not self._partitions:
            self._reached = max(self._reached, _bounded(micros))

    def keep(self, partitions: Collection[Partition]) -> None:
        """Take all other partitions out: they are read up to their end, and hold nothing."""
        self._partitions = {known: micros for known, micros in self._partitions.items() if known in partitions}

    def current_watermark(self) -> Timestamp:
        """Return the watermark of the group."""
        if self._partitions:
            self._reached = max(self._reached, min(self._partitions.values()))
        return Timestamp(micros=self._reached)

    def get_estimator_state(self) -> tuple[int, dict[Partition, int]]:
        """Return the state that the rest of the group continues with."""
        self.current_watermark()
        return self._reached, dict(self._partitions)


class GroupWatermarks(WatermarkEstimatorProvider):
    """Makes a :class:`GroupWatermark` for each group."""

    def initial_estimator_state(self, element: Any, restriction: Any) -> tuple[int, dict[Partition, int]]:
        """Return the state of a group of which nothing is known."""
        return _MIN_MICROS, {}

    def create_watermark_estimator(self, estimator_state: tuple[int, dict[Partition, int]]) -> GroupWatermark:
        """Return a watermark that continues at the state."""
        return GroupWatermark(estimator_state)
