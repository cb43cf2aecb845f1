"""Records as elements: every field survives the coder, and Beam finds the coder."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from apache_beam import coders

from luminosity import KafkaRecord
from luminosity.errors import InvalidType
from luminosity.io.kafka.record import KafkaRecordCoder

_HEADERS = (("a", b"1"), ("a", None), ("ü", b""), ("b", b"\x00\xff"))


@pytest.mark.parametrize("key", [None, b"", b"\xff\x00", "", "schlüssel", {"a": [1, None]}, "\ud800"])
@pytest.mark.parametrize("value", [None, b"", b"x" * 1_000_000, "text", 7, b"1" * 70_000])
@pytest.mark.parametrize("headers", [(), _HEADERS])
def test_every_record_survives(key: Any, value: Any, headers: Any) -> None:
    record = KafkaRecord("reviews", 2**31 - 1, 2**63 - 1, -1, 0, key, value, headers)
    coder = KafkaRecordCoder()
    again = coder.decode(coder.encode(record))
    assert again == record
    assert type(again) is KafkaRecord
    assert [type(part) for part in again] == [type(part) for part in record]


@pytest.mark.parametrize("timestamp", [-(2**63), -1, 0, 1, 2**63 - 1])
def test_timestamps_are_kept_as_they_are(timestamp: int) -> None:
    record = KafkaRecord("reviews", 0, 0, timestamp, 1, None, None)
    assert KafkaRecordCoder().decode(KafkaRecordCoder().encode(record)) == record


def test_beam_takes_the_coder_for_the_type() -> None:
    assert isinstance(coders.registry.get_coder(KafkaRecord), KafkaRecordCoder)
    pair = coders.TupleCoder([coders.registry.get_coder(KafkaRecord), coders.VarIntCoder()])
    record = KafkaRecord("reviews", 0, 1, 2, 1, b"k", None, _HEADERS)
    assert pair.decode(pair.encode((record, 3))) == (record, 3)
    assert pickle.loads(pickle.dumps(record)) == record


def test_other_elements_are_refused() -> None:
    with pytest.raises(InvalidType, match="found an element of type tuple, expected a KafkaRecord"):
        KafkaRecordCoder().encode(("reviews", 0, 1, 2, 1, b"k", None, ()))


def test_the_last_header_of_a_name_counts() -> None:
    record = KafkaRecord("reviews", 0, 1, 2, 1, b"k", b"v", _HEADERS)
    assert (record.header("a"), record.header("b"), record.header("c")) == (None, b"\x00\xff", None)
    assert not record.is_tombstone
    assert KafkaRecord("reviews", 0, 1, 2, 1, b"k", None).is_tombstone
    assert not KafkaRecord("reviews", 0, 1, 2, 1, b"k", b"").is_tombstone


def test_the_estimate_is_near_the_size() -> None:
    record = KafkaRecord("reviews", 0, 1, 2, 1, b"k" * 10, b"v" * 1000, _HEADERS)
    coder = KafkaRecordCoder()
    assert abs(coder.estimate_size(record) - len(coder.encode(record))) < 20
