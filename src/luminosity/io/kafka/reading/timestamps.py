"""The event times of records, and how far a group of partitions has come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from datetime import datetime, timezone
from typing import Any, NamedTuple

from apache_beam.io.iobase import WatermarkEstimator
from apache_beam.transforms.core import WatermarkEstimatorProvider
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp

from luminosity._shared.text import shorten_repr
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.io.kafka.reading.positions import Partition
from luminosity.io.kafka.record import KafkaRecord

__all__ = ["GroupWatermark", "GroupWatermarks", "TimestampPolicy"]

_MIN_MICROS = MIN_TIMESTAMP.micros
_MAX_MICROS = GlobalWindow().max_timestamp().micros
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
    if isinstance(value, Timestamp):
        return _bounded(value.micros)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return _bounded(Timestamp.from_utc_datetime(value.astimezone(timezone.utc)).micros)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _bounded(round(value * 1e6))
    raise InvalidType(
        f"found {shorten_repr(value, 80)} from the function timestamps=, expected seconds since 1970, a datetime with "
        "a time zone or a Beam Timestamp"
    )


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
