"""Elements of a pipeline as records that go to Kafka."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
from apache_beam.utils.timestamp import Timestamp

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import InvalidArgument, InvalidType, KafkaError
from luminosity.io.kafka.record import KafkaRecord
from luminosity.io.writing.encoders import json_lines

__all__ = ["UNWRITTEN", "Outgoing", "Part", "RecordParts", "UnwrittenRecord"]

Part = Callable[[Any], Any] | str | None
"""Where a part of a record comes from: a function of the element, or the name of a column or of a dict's key."""

UNWRITTEN = "unwritten"
"""The tag of dead letters."""

_PARTS = ("topic", "key", "value", "headers", "timestamp", "partition")
_ANY_PARTITION = -1  # librdkafka chooses it by the key
_NOW = 0  # as a timestamp of librdkafka
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_MILLISECOND = datetime.timedelta(milliseconds=1)


class Outgoing(NamedTuple):
    """A record as the client takes it."""

    topic: str
    value: bytes | None
    key: bytes | None
    partition: int
    timestamp: int  # milliseconds; 0 lets the client take the time when it sends
    headers: list[tuple[str, bytes | None]] | None


@dataclass(frozen=True)
class UnwrittenRecord:
    """A dead letter of ``WriteKafka``: an element that Kafka does not have, and the reason.

    Attributes:
        element: the element, or a record batch with the one row.
        reason: the type of the error and its message.
        topic: the topic, or None if the element could not be made into a record.
        partition: the partition, or None if it was not chosen yet.
        key: the record's key.
    """

    element: Any
    reason: str
    topic: str | None = None
    partition: int | None = None
    key: bytes | None = None


class RecordParts:
    """Makes records of elements. It travels with the pipeline.

    >>> parts = RecordParts(topic="words", key=str.lower, value=str)
    >>> parts.record("One")
    Outgoing(topic='words', value=b'One', key=b'one', partition=-1, timestamp=0, headers=None)
    """

    def __init__(
        self,
        topic: Part = None,  # a string is the topic itself
        key: Part = None,
        value: Part = None,
        headers: Part = None,
        timestamp: Part = None,
        partition: Part = None,
    ) -> None:
        self.topic = topic
        self._parts: tuple[Part, ...] = (topic, key, value, headers, timestamp, partition)
        self._is_opaque = value is not None  # The element does not say what to write.
        self._given = any(part is not None for part in self._parts[1:]) or callable(topic)
        self._has_one_topic = isinstance(topic, str) and not self._given  # and elements say the rest
        for name, part in zip(_PARTS, self._parts, strict=True):
            if part is not None and not isinstance(part, str) and not callable(part):
                raise InvalidType(f"found {name}= of type {type(part).__name__}, expected a function or a name")
        if topic == "":
            raise InvalidArgument("found topic='', expected a name, a function or None")

    def record(self, element: Any) -> Outgoing:
        """Return the record that an element describes."""
        if element.__class__ is tuple and self._has_one_topic and len(element) == 2:  # the most frequent kind
            key, value = element
            if value.__class__ is not bytes and value is not None:
                value = _bytes(value, "value")
            if key.__class__ is not bytes and key is not None:
                key = _bytes(key, "key")
            return tuple.__new__(Outgoing, (self.topic, value, key, _ANY_PARTITION, _NOW, None))
        topic = key = value = headers = timestamp = partition = None
        kind = element.__class__
        if kind is KafkaRecord:
            topic, _, _, timestamp, _, key, value, headers = element
        elif self._is_opaque:
            pass
        elif kind is tuple and len(element) == 2:  # The most frequent kinds first: each check takes its time.
            key, value = element
        elif element is None or isinstance(element, (bytes, str)):
            value = element
        elif kind is dict or isinstance(element, Mapping):
            topic, key, value, headers, timestamp, partition = _fields(element)
        elif isinstance(element, tuple) and len(element) == 2:  # pyright: ignore[reportUnknownArgumentType]
            key, value = element
        else:
            raise InvalidType(
                f"found an element of type {type(element).__name__}, expected a KafkaRecord, a tuple of key and value, "
                "a dict, bytes, a text, None, or a record batch",
                fix="pass value= with a function that returns bytes",
            )
        if self._given:
            said = (topic, key, value, headers, timestamp, partition)
            topic, key, value, headers, timestamp, partition = self._replaced(said, element)
        elif self.topic is not None:
            topic = self.topic
        return _outgoing(topic, key, value, headers, timestamp, partition)

    def _replaced(self, said: tuple[Any, ...], element: Any) -> Iterator[Any]:
        """Yield the parts that the arguments give, and the element's own otherwise."""
        for name, part, own in zip(_PARTS, self._parts, said, strict=True):
            if part is None:
                yield own
            elif not isinstance(part, str):
                yield part(element)
            else:
                yield part if name == "topic" else _item(element, part)

    def rows(self, batch: pa.RecordBatch) -> Iterator[Callable[[], Outgoing]]:
        """Yield a function for each row that returns its record. Raises here if a column is missing."""
        columns = [_column(batch, part, name) for name, part in zip(_PARTS, self._parts, strict=True)]
        if not self._is_opaque:
            columns[_PARTS.index("value")] = _json(batch)

        def make(row: int) -> Outgoing:
            return _outgoing(
                *(_at(column, row) for column in columns[:2]), *(_at(column, row) for column in columns[2:])
            )

        for row in range(batch.num_rows):
            yield lambda row=row: make(row)


def _column(batch: pa.RecordBatch, part: Part, name: str) -> Any:
    """Return a list of the rows' values, a function of the row's number, or a constant."""
    if part is None or (name == "topic" and isinstance(part, str)):
        return part
    if not isinstance(part, str):
        return lambda row: part(batch.slice(row, 1).to_pylist()[0])
    if part not in batch.schema.names:
        raise InvalidArgument(
            f"found {name}={part!r}, expected a column of the table: {list_some(batch.schema.names, 20)}",
            fix=did_you_mean(part, batch.schema.names),
        )
    return batch.column(part).to_pylist()


def _at(column: Any, row: int) -> Any:
    if isinstance(column, list):
        return column[row]
    return column(row) if callable(column) else column


def _json(batch: pa.RecordBatch) -> list[bytes]:
    return [line for part in json_lines(pa.Table.from_batches([batch])) for line in part.to_pybytes().split(b"\n")[:-1]]


def _item(element: Any, name: str) -> Any:
    try:
        return element[name]
    except (KeyError, TypeError, IndexError):
        raise InvalidArgument(
            f"found an element of type {type(element).__name__} without {name!r}, expected it as the arguments say"
        ) from None


def _fields(element: Mapping[str, Any]) -> Iterator[Any]:
    unknown = [name for name in element if name not in _PARTS]
    if unknown or "value" not in element:
        raise InvalidType(
            f"found a dict with {list_some(map(repr, element), 10)}, expected 'value' and any of "
            f"{', '.join(repr(name) for name in _PARTS if name != 'value')}",
            fix="pass value=json.dumps to write dicts as JSON",
        )
    return (element.get(name) for name in _PARTS)


def _outgoing(topic: Any, key: Any, value: Any, headers: Any, timestamp: Any, partition: Any) -> Outgoing:
    if topic.__class__ is not str or not topic:
        raise KafkaError(f"found topic {topic!r}, expected the name of one", fix="pass topic= to WriteKafka")
    if value.__class__ is not bytes and value is not None:
        value = _bytes(value, "value")
    if key.__class__ is not bytes and key is not None:
        key = _bytes(key, "key")
    if timestamp is None:
        timestamp = _NOW
    elif timestamp.__class__ is not int or timestamp < 1:
        timestamp = _milliseconds(timestamp)
    if partition is None:
        partition = _ANY_PARTITION
    elif not isinstance(partition, int) or partition < 0:
        raise InvalidArgument(f"found partition {partition!r}, expected a number from 0 on, or None")
    parts = topic, value, key, partition, timestamp, [*_pairs(headers)] if headers else None
    return tuple.__new__(Outgoing, parts)  # which takes half as long as Outgoing(...)


def _bytes(part: Any, name: str) -> bytes:
    if part.__class__ is str or isinstance(part, str):
        try:
            return part.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"found a {name} that UTF-8 can't encode: {error}", fix="pass bytes") from None
    if isinstance(part, (bytes, bytearray, memoryview)):
        return bytes(part)
    raise InvalidType(
        f"found a {name} of type {type(part).__name__}, expected bytes, a text or None",
        fix=f"pass {name}= with a function that returns bytes, such as one with json.dumps",
    )


def _milliseconds(timestamp: Any) -> int:
    if timestamp == -1:
        return _NOW  # A record without a timestamp gets one, as from other clients.
    if isinstance(timestamp, Timestamp):
        timestamp = timestamp.micros // 1000
    elif isinstance(timestamp, datetime.datetime):
        aware = timestamp if timestamp.tzinfo else timestamp.replace(tzinfo=datetime.timezone.utc)
        timestamp = (aware - _EPOCH) // _MILLISECOND
    if not isinstance(timestamp, int):
        raise InvalidType(
            f"found a timestamp of type {type(timestamp).__name__}, expected milliseconds as an int, a datetime, or "
            "Beam's Timestamp"
        )
    if timestamp < 0:
        raise InvalidArgument(f"found the timestamp {timestamp}, expected milliseconds from 1970 on")
    return timestamp or 1  # 0 would mean now to librdkafka: a millisecond off is nearer.


def _pairs(headers: Any) -> Iterator[tuple[str, bytes | None]]:
    pairs: Sequence[Any] = [*headers.items()] if isinstance(headers, Mapping) else headers
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):  # pyright: ignore[reportUnknownArgumentType]
            raise InvalidType(f"found a header {pair!r}, expected a tuple of a name and a value")
        name, value = pair
        yield name, value if value is None or value.__class__ is bytes else _bytes(value, f"header {name!r}")
