"""A record of Kafka as an element of a pipeline, and its coder."""

from __future__ import annotations

import pickle
import struct
from functools import lru_cache
from typing import Any, NamedTuple

from apache_beam import coders

from luminosity.errors import InvalidType

__all__ = [
    "CREATE_TIME",
    "LOG_APPEND_TIME",
    "NO_TIMESTAMP",
    "KafkaRecord",
    "KafkaRecordCoder",
    "Partition",
]

NO_TIMESTAMP = 0  # the numbers of librdkafka
CREATE_TIME = 1
LOG_APPEND_TIME = 2

Partition = tuple[str, int]
"""A topic and the number of one of its partitions."""

# How a key or value is encoded.
_NONE, _BYTES, _TEXT, _PICKLED = range(4)

# kinds of key and value, partition, offset, timestamp, its type, and the lengths of topic, key, value and headers
_HEAD = struct.Struct("<BiqqbHIII")
_HEADER = struct.Struct("<Ii")  # the lengths of a header's name and value; -1 for null


class KafkaRecord(NamedTuple):
    """One record of a Kafka topic, with its coordinates.

    >>> record = KafkaRecord("reviews", 0, 41, 1700000000000, 1, b"movie-7", None, (("source", b"web"),))
    >>> record.is_tombstone, record.header("source")
    (True, b'web')

    Attributes:
        topic: the topic.
        partition: the partition of the topic.
        offset: the position in the partition.
        timestamp: milliseconds since 1970, or -1 if the record has no timestamp.
        timestamp_type: 0 if there is no timestamp, 1 if the producer set it, 2 if the broker set it when it appended
            the record.
        key: the key, or None.
        value: the value. None is a tombstone, which deletes the key; an empty value is ``b""``.
        headers: pairs of a name and a value, in order. Names may repeat, and a value may be None.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: Any
    value: Any
    headers: tuple[tuple[str, bytes | None], ...] = ()

    @property
    def is_tombstone(self) -> bool:
        """Whether the record deletes its key: it has no value."""
        return self.value is None

    def header(self, name: str) -> bytes | None:
        """Return the value of the last header of this name, or None if there is none."""
        for each, value in reversed(self.headers):
            if each == name:
                return value
        return None


class KafkaRecordCoder(coders.Coder):
    """Encodes records whose keys and values are bytes, texts or None as they are, and others as pickles.

    >>> coder = KafkaRecordCoder()
    >>> record = KafkaRecord("reviews", 3, 41, -1, 0, None, b"", (("a", b"1"), ("a", None)))
    >>> coder.decode(coder.encode(record)) == record
    True
    """

    def encode(self, value: Any) -> bytes:
        """Write a head of fixed length, then topic, key, value and headers."""
        if not isinstance(value, KafkaRecord):
            raise InvalidType(f"found an element of type {type(value).__name__}, expected a KafkaRecord")
        topic, partition, offset, timestamp, timestamp_type, key, content, headers = value
        key_kind, key_bytes = _encode(key)
        kind, content_bytes = _encode(content)
        name = _topic_bytes(topic)
        tail = _encode_headers(headers) if headers else b""
        head = _HEAD.pack(
            key_kind | kind << 2,
            partition,
            offset,
            timestamp,
            timestamp_type,
            len(name),
            len(key_bytes),
            len(content_bytes),
            len(tail),
        )
        return b"".join((head, name, key_bytes, content_bytes, tail))

    def decode(self, encoded: bytes) -> KafkaRecord:
        """Read a record that :meth:`encode` wrote."""
        kinds, partition, offset, timestamp, timestamp_type, name, key, content, tail = _HEAD.unpack_from(encoded)
        key_at = _HEAD.size + name
        content_at = key_at + key
        tail_at = content_at + content
        return KafkaRecord(
            _topic_text(encoded[_HEAD.size : key_at]),
            partition,
            offset,
            timestamp,
            timestamp_type,
            _decode(kinds & 3, encoded[key_at:content_at]),
            _decode(kinds >> 2, encoded[content_at:tail_at]),
            _decode_headers(encoded[tail_at : tail_at + tail]) if tail else (),
        )

    def estimate_size(self, value: KafkaRecord) -> int:
        """Return the bytes of the record; keys and values that are neither bytes nor texts count as 64."""
        size = _HEAD.size + len(value.topic)
        for part in (value.key, value.value):
            size += len(part) if isinstance(part, (bytes, str)) else 64 if part is not None else 0
        return size + sum(8 + len(name) + len(content or b"") for name, content in value.headers)

    def to_type_hint(self) -> Any:
        """Return ``KafkaRecord``, the type of the elements."""
        return KafkaRecord


def _encode(part: Any) -> tuple[int, bytes]:
    kind = type(part)
    if kind is bytes:
        return _BYTES, part
    if part is None:
        return _NONE, b""
    if kind is str:
        try:
            return _TEXT, part.encode()
        except UnicodeEncodeError:  # a lone surrogate, which JSON can spell
            return _PICKLED, pickle.dumps(part, 5)
    return _PICKLED, pickle.dumps(part, 5)


def _decode(kind: int, encoded: bytes) -> Any:
    if kind == _BYTES:
        return encoded
    if kind == _NONE:
        return None
    return encoded.decode() if kind == _TEXT else pickle.loads(encoded)


def _encode_headers(headers: tuple[tuple[str, bytes | None], ...]) -> bytes:
    parts: list[bytes] = []
    for name, value in headers:
        encoded = name.encode()
        parts += _HEADER.pack(len(encoded), -1 if value is None else len(value)), encoded, value or b""
    return b"".join(parts)


def _decode_headers(encoded: bytes) -> tuple[tuple[str, bytes | None], ...]:
    headers: list[tuple[str, bytes | None]] = []
    at = 0
    while at < len(encoded):
        name, value = _HEADER.unpack_from(encoded, at)
        at += _HEADER.size
        end = at + name + max(value, 0)
        headers.append((encoded[at : at + name].decode(), None if value < 0 else encoded[at + name : end]))
        at = end
    return tuple(headers)


@lru_cache(1024)
def _topic_bytes(topic: str) -> bytes:
    return topic.encode()


@lru_cache(1024)
def _topic_text(topic: bytes) -> str:
    return topic.decode()


coders.registry.register_coder(KafkaRecord, KafkaRecordCoder)
