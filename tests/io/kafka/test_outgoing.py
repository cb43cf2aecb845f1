from __future__ import annotations

import datetime
import json
from typing import Any

import pyarrow as pa
import pytest
from apache_beam.utils.timestamp import Timestamp

from luminosity import KafkaRecord
from luminosity.errors import InvalidArgument, InvalidType, KafkaError
from luminosity.io.kafka.outgoing import Outgoing, RecordParts

HEADERS = (("a", b"1"), ("a", b"2"), ("b", None), ("c", b""))


def outgoing(**parts: Any) -> Outgoing:
    return Outgoing(
        **{"topic": "t", "value": None, "key": None, "partition": -1, "timestamp": 0, "headers": None} | parts
    )


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        (b"v", outgoing(value=b"v")),
        ("ü", outgoing(value="ü".encode())),
        ("", outgoing(value=b"")),
        (None, outgoing()),
        (("k", "v"), outgoing(key=b"k", value=b"v")),
        ((b"", None), outgoing(key=b"")),
        ((None, bytearray(b"v")), outgoing(value=b"v")),
        ({"value": "v"}, outgoing(value=b"v")),
        (
            {"value": None, "key": "k", "headers": {"a": "1"}, "timestamp": 5, "partition": 0, "topic": "ignored"},
            outgoing(key=b"k", headers=[("a", b"1")], timestamp=5, partition=0),
        ),
        (
            KafkaRecord("from", 3, 41, 1_700_000_000_000, 1, b"k", b"v", HEADERS),
            outgoing(key=b"k", value=b"v", headers=list(HEADERS), timestamp=1_700_000_000_000),
        ),
        (KafkaRecord("from", 3, 41, -1, 0, None, None), outgoing()),
        (KafkaRecord("from", 3, 41, 0, 1, None, b""), outgoing(value=b"", timestamp=1)),
    ],
)
def test_elements_say_what_to_write(element: Any, expected: Outgoing) -> None:
    assert RecordParts(topic="t").record(element) == expected


def test_the_topic_comes_from_the_element_or_a_function() -> None:
    record = KafkaRecord("from", 0, 0, -1, 0, None, b"v")
    assert RecordParts().record(record).topic == "from"
    assert RecordParts().record({"topic": "there", "value": b""}).topic == "there"
    assert RecordParts(topic=lambda element: f"to-{element[0]}").record(("k", "v")).topic == "to-k"


def test_functions_and_names_say_what_to_write() -> None:
    parts = RecordParts("t", key="id", value=json.dumps, headers=lambda row: [("n", str(row["n"]))], partition="n")
    assert parts.record({"id": "k", "n": 2}) == outgoing(
        key=b"k", value=b'{"id": "k", "n": 2}', headers=[("n", b"2")], partition=2
    )
    record = KafkaRecord("from", 3, 41, 7, 1, b"k", b"v", HEADERS)
    changed = RecordParts("t", value=lambda record: record.value * 2, partition=lambda record: record.partition)
    assert changed.record(record) == outgoing(key=b"k", value=b"vv", headers=list(HEADERS), timestamp=7, partition=3), (
        "a function replaces its part of a KafkaRecord alone"
    )


@pytest.mark.parametrize(
    ("given", "milliseconds"),
    [
        (None, 0),
        (-1, 0),
        (0, 1),
        (Timestamp(micros=0), 1),
        (1_700_000_000_123, 1_700_000_000_123),
        (Timestamp(1.5), 1_500),
        (datetime.datetime(1970, 1, 1, 0, 0, 2), 2_000),
        (datetime.datetime(1970, 1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1))), 1),
    ],
)
def test_timestamps(given: Any, milliseconds: int) -> None:
    assert RecordParts("t", timestamp=lambda _: given).record("v").timestamp == milliseconds


@pytest.mark.parametrize(
    ("parts", "element", "error", "message"),
    [
        ({}, "v", KafkaError, "found topic None.*; pass topic= to WriteKafka"),
        ({"topic": lambda _: 7}, "v", KafkaError, "found topic 7"),
        ({"topic": "t"}, 3.14, InvalidType, "found an element of type float"),
        ({"topic": "t"}, ("a", "b", "c"), InvalidType, "found an element of type tuple"),
        ({"topic": "t"}, {"id": 1}, InvalidType, "found a dict with 'id', expected 'value'.*value=json.dumps"),
        ({"topic": "t"}, {"value": 1, "valeu": 2}, InvalidType, "found a dict with 'value', 'valeu'"),
        ({"topic": "t"}, ("k", {"a": 1}), InvalidType, "found a value of type dict"),
        ({"topic": "t"}, (1, "v"), InvalidType, "found a key of type int"),
        ({"topic": "t"}, "\ud800", InvalidArgument, "a value that UTF-8 can't encode"),
        ({"topic": "t", "partition": lambda _: -1}, "v", InvalidArgument, "found partition -1"),
        ({"topic": "t", "timestamp": lambda _: -2}, "v", InvalidArgument, "found the timestamp -2"),
        ({"topic": "t", "timestamp": lambda _: 1.5}, "v", InvalidType, "found a timestamp of type float"),
        ({"topic": "t", "headers": lambda _: ["a"]}, "v", InvalidType, "found a header 'a'"),
        ({"topic": "t", "headers": lambda _: {"a": 1}}, "v", InvalidType, "found a header 'a' of type int"),
        ({"topic": "t", "value": "text"}, {"id": 1}, InvalidArgument, "element of type dict without 'text'"),
    ],
)
def test_mistakes_are_named(parts: Any, element: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RecordParts(**parts).record(element)


TABLE = pa.record_batch(
    {
        "id": ["a", "b", None],
        "text": ["x\ny", None, ""],
        "at": pa.array([0, 1_000, None], pa.timestamp("ms")),
        "n": [1, 0, None],
    }
)


def test_rows_are_json_unless_a_column_is_named() -> None:
    records = [make() for make in RecordParts("t", key="id").rows(TABLE)]
    assert [record.key for record in records] == [b"a", b"b", None]
    assert json.loads(records[0].value or b"") == {
        "id": "a",
        "text": "x\ny",
        "at": "1970-01-01T00:00:00.000",
        "n": 1,
    }
    assert len(records) == 3


def test_columns_and_functions_of_rows() -> None:
    parts = RecordParts(
        topic=lambda row: f"to-{row['n']}",
        key="id",
        value="text",
        timestamp="at",
        partition="n",
        headers=lambda row: {"id": row["id"]},
    )
    assert [make() for make in parts.rows(TABLE)] == [
        Outgoing("to-1", b"x\ny", b"a", 1, 1, [("id", b"a")]),
        Outgoing("to-0", None, b"b", 0, 1_000, [("id", b"b")]),
        Outgoing("to-None", b"", None, -1, 0, [("id", None)]),
    ]


def test_a_missing_column_is_named() -> None:
    with pytest.raises(
        InvalidArgument, match=r"found value='texts', expected a column of the table: id.*did you mean 'text'"
    ):
        list(RecordParts("t", value="texts").rows(TABLE))
