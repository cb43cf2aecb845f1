"""What a read emits: records, values or dead letters, with their event times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apache_beam import pvalue
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils import windowed_value

from luminosity._text import first_line
from luminosity.errors import Fix, KafkaError, LuminosityError
from luminosity.io.kafka.reading.deserialize import Deserializer
from luminosity.io.kafka.reading.registry import Unreadable
from luminosity.io.kafka.reading.timestamps import TimestampPolicy
from luminosity.io.kafka.record import KafkaRecord

__all__ = ["UNREADABLE", "Emitter", "Tally"]

UNREADABLE = "unreadable"  # the tag of dead letters

_GLOBAL = (GlobalWindow(),)
_USUAL_MS = 4_102_444_800_000  # the year 2100: an element can have any time before it
_REASON = 300  # characters of a reason at most


class Emitter:
    """Turns records of one partition into elements with times. It travels with the pipeline."""

    def __init__(
        self,
        timestamps: TimestampPolicy,
        deserializer: Deserializer | None,
        *,
        values_only: bool = False,
        keeps_unreadable: bool = False,
    ) -> None:
        self.timestamps = timestamps
        self.deserializer = deserializer
        self.values_only = values_only
        self.keeps_unreadable = keeps_unreadable

    def emit(self, records: list[KafkaRecord], now_micros: int, tally: Tally) -> Iterator[Any]:
        """Yield an element for each record, and count in ``tally``."""
        create, stamp, values_only = windowed_value.create, self.timestamps.micros, self.values_only
        if self.deserializer is None and self.timestamps.function is None:
            # The most frequent path: what `stamp` does is spelled out for a usual time, which saves its call.
            has_own_time = self.timestamps.kind != "processing"
            newest = tally.newest
            for record in records:
                timestamp = record.timestamp
                is_usual = has_own_time and 0 <= timestamp < _USUAL_MS
                micros = timestamp * 1000 if is_usual else stamp(record, now_micros)
                if micros > newest:
                    newest = micros
                yield create(record.value if values_only else record, micros, _GLOBAL)
            tally.newest = newest
            return
        for record in records:
            found = self.read(record, now_micros, tally)
            if isinstance(found, tuple):
                made, micros = found
                yield create(made.value if values_only else made, micros, _GLOBAL)
            else:
                yield found

    def read(self, record: KafkaRecord, now_micros: int, tally: Tally) -> tuple[KafkaRecord, int] | Any:
        """Return the record with its objects and its time, or a dead letter."""
        try:
            made = record if self.deserializer is None else self.deserializer.read(record)
            micros = self._time(made, now_micros)
        except Unreadable as error:
            return self.unreadable(record, error, now_micros, tally)
        tally.newest = max(tally.newest, micros)
        return made, micros

    def unreadable(self, record: KafkaRecord, error: Unreadable, now_micros: int, tally: Tally) -> Any:
        """Return a dead letter, or raise ``KafkaError`` if these are not collected."""
        if not self.keeps_unreadable:
            raise KafkaError(
                f"{record.topic}[{record.partition}] offset {record.offset}: {error}",
                fix=Fix("call .with_exception_handling() to collect such records"),
            ) from error
        tally.unreadable += 1
        micros = TimestampPolicy("record", 0).micros(record, now_micros)
        return pvalue.TaggedOutput(UNREADABLE, windowed_value.create((record, str(error)), micros, _GLOBAL))

    def _time(self, record: KafkaRecord, now_micros: int) -> int:
        try:
            return self.timestamps.micros(record, now_micros)
        except LuminosityError:
            raise
        except Exception as error:  # in the function of the user
            text = first_line(f"{type(error).__name__}: {error}", _REASON)
            raise Unreadable(f"the function timestamps= raised {text}") from error


class Tally:
    """Counts what the records of one partition came to."""

    def __init__(self) -> None:
        self.newest = -(1 << 63)  # the latest event time, in microseconds
        self.unreadable = 0
