"""What a read emits: records, values or dead letters, with their event times, many in one element at first."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import apache_beam as beam
from apache_beam import coders, pvalue
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils import windowed_value

from luminosity._shared.text import first_line
from luminosity.errors import Fix, KafkaError, LuminosityError
from luminosity.io.kafka.reading.deserialize import Deserializer
from luminosity.io.kafka.reading.registry import Unreadable
from luminosity.io.kafka.reading.timestamps import TimestampPolicy
from luminosity.io.kafka.record import KafkaRecord

__all__ = ["UNREADABLE", "Emitter", "Outputs", "Tally", "Unpack"]

UNREADABLE = "unreadable"  # the tag of dead letters

_GLOBAL = (GlobalWindow(),)
_USUAL_MICROS = 4_102_444_800_000_000  # the year 2100: an element can have any time before it
_REASON = 300  # characters of a reason at most
_OUTPUT_BYTES = 500  # a guess, which only metrics show: the size of a record with its key, value and time


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

    def emit(self, records: list[KafkaRecord], now_micros: int, tally: Tally) -> Iterable[Any]:
        """Return an element for each record, with its time, and count in ``tally``."""
        create, values_only = windowed_value.create, self.values_only
        if self.deserializer is None and self.timestamps.kind in ("record", "log_append"):
            # The most frequent path: what `micros` of the policy does is spelled out, for usual times.
            times = [record.timestamp * 1000 for record in records]
            newest = max(times)
            if min(times) >= 0 and newest < _USUAL_MICROS:
                tally.newest = max(tally.newest, newest)
                return map(create, [r.value for r in records] if values_only else records, times, repeat(_GLOBAL))
        elements: list[Any] = []
        for record in records:
            found = self.read(record, now_micros, tally)
            if isinstance(found, tuple):
                made, micros = found
                found = create(made.value if values_only else made, micros, _GLOBAL)
            elements.append(found)
        return elements

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


class Outputs(list[Any]):
    """Elements and dead letters, with their times, which a read emits as one.

    Beam's overhead for an output of a splittable ``DoFn`` is several times that of any other step.
    """


class OutputsCoder(coders.Coder):
    """Encodes outputs as a pickle, on runners that don't run :class:`Unpack` together with the read."""

    def encode(self, value: Outputs) -> bytes:
        """Return a pickle."""
        return pickle.dumps(value, 5)

    def decode(self, encoded: bytes) -> Outputs:
        """Return the outputs."""
        return pickle.loads(encoded)

    def estimate_size(self, value: Outputs) -> int:
        """Return a guess, without a look at all records."""
        return _OUTPUT_BYTES * len(value)

    def is_deterministic(self) -> bool:
        """Return False: equal values may have different pickles."""
        return False

    def to_type_hint(self) -> Any:
        """Return ``Outputs``, the type of the elements."""
        return Outputs

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class Unpack(beam.DoFn):
    """Emits each of the outputs of a read, with its own time."""

    def process(self, element: Outputs) -> Outputs:
        """Return the outputs as they are."""
        return element


coders.registry.register_coder(Outputs, OutputsCoder)
