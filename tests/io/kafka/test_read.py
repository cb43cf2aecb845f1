"""ReadKafka in pipelines, on Beam's own runner and on ours, against a broker."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import apache_beam as beam
import confluent_kafka
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import FixedWindows
from apache_beam.utils.timestamp import Timestamp

from luminosity import KafkaRecord, LuminosityRunner, ReadKafka
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.testing import KafkaBroker
from tests.both_runners import counters
from tests.streams import Notes, wait_for

_START = 1_700_000_000_000


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaBroker]:
    with KafkaBroker({"reviews": 3, "empty": 2, "odd": 1}) as made:
        made.produce_many(
            "reviews",
            [{"key": f"k{n}", "value": f"v{n}", "partition": n % 3, "timestamp": _START + n} for n in range(30)],
        )
        made.produce_many(
            "odd",
            [
                {"value": None, "key": "gone"},
                {"value": b""},
                {"value": b"x" * 900_000, "key": b"\xff"},
                {"value": "h", "headers": [("a", b"1"), ("a", b"2"), ("b", None)]},
                {"value": "no time", "timestamp": -1},
            ],
        )
        yield made


def test_a_bounded_read_is_a_batch_and_ends(broker: KafkaBroker, runner_name: str) -> None:
    """Empty partitions and topics are read, too."""
    pipeline = beam.Pipeline(runner_name)
    group = f"readers on {runner_name}"
    records = pipeline | ReadKafka(broker.bootstrap_servers, ["reviews", "empty"], stop="now", group_id=group)
    assert records.is_bounded
    assert records.element_type is KafkaRecord
    found = records | beam.Map(lambda record: tuple(record)[:7])
    assert_that(
        found,
        equal_to(
            [("reviews", n % 3, n // 3, _START + n, 1, b"k%d" % n, b"v%d" % n) for n in range(30)],
        ),
    )
    result = pipeline.run()
    result.wait_until_finish()
    assert counters(result)["records_read"] == 30
    consumer = confluent_kafka.Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": group})
    listed = [confluent_kafka.TopicPartition("reviews", number) for number in range(3)]
    assert [each.offset for each in consumer.committed(listed, timeout=30)] == [10, 10, 10]
    consumer.close()


def test_odd_records_come_as_they_are(broker: KafkaBroker, tmp_path: Path) -> None:
    path = str(tmp_path / "found")

    def keep(record: KafkaRecord) -> None:
        with open(path, "ab") as file:
            pickle.dump(record, file)

    with beam.Pipeline("FnApiRunner") as pipeline:
        # A Reshuffle encodes them.
        _ = pipeline | ReadKafka(broker.bootstrap_servers, "odd", stop={0: 5}) | beam.Reshuffle() | beam.Map(keep)
    with open(path, "rb") as file:
        records = sorted((pickle.load(file) for _ in range(5)), key=lambda record: record.offset)
    assert [(r.key, r.value if r.offset != 2 else len(r.value), r.headers) for r in records] == [
        (b"gone", None, ()),
        (None, b"", ()),
        (b"\xff", 900_000, ()),
        (None, b"h", (("a", b"1"), ("a", b"2"), ("b", None))),
        (None, b"no time", ()),
    ]
    assert records[4].timestamp == -1


def test_a_stream_gives_windows_while_it_runs_and_finds_a_new_topic(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    with KafkaBroker({"clicks-a": 2}) as broker:
        broker.produce_many("clicks-a", [{"value": str(n), "timestamp": _START + n} for n in range(10)])
        pipeline = beam.Pipeline(LuminosityRunner(), beam.options.pipeline_options.PipelineOptions(["--progress=off"]))
        read = ReadKafka(
            pattern="clicks-.*",
            bootstrap_servers=broker.bootstrap_servers,
            group_id="tests",
            max_out_of_orderness=0,
            discover_every_s=0.2,
            groups=2,
            value="utf8",
        )
        records = pipeline | read
        assert not records.is_bounded
        _ = (
            records
            | "New" >> beam.Filter(lambda record: record.topic != "clicks-a")
            | notes.step(lambda record: [record.topic, record.value])
        )
        counts = records | beam.WindowInto(FixedWindows(3600)) | beam.combiners.Count.Globally().without_defaults()
        _ = counts | "Count" >> notes.step(lambda count: count)
        result: Any = pipeline.run()
        try:
            assert wait_for(lambda: 10 in notes.read()), "the window ends although no later record comes"
            broker.create_topic("clicks-b", 1)
            broker.produce("clicks-b", "new")
            assert wait_for(lambda: ["clicks-b", "new"] in notes.read())
        finally:
            result.cancel()
        assert notes.read().count(["clicks-b", "new"]) == 1


def test_a_read_up_to_a_time_in_the_future_is_a_stream() -> None:
    pipeline = beam.Pipeline("DirectRunner")
    now = datetime.now(timezone.utc)
    assert not (pipeline | "Later" >> ReadKafka("one:9092", "t", stop=now + timedelta(hours=1))).is_bounded
    assert (pipeline | "Before" >> ReadKafka("one:9092", "t", stop=now - timedelta(hours=1))).is_bounded


def test_arguments_are_checked_when_the_transform_is_made() -> None:
    for arguments, message in (
        ({}, "both or neither of topics= and pattern="),
        ({"topics": "t", "pattern": "t"}, "both or neither"),
        ({"pattern": "("}, r"pattern='\(', expected a regular expression"),
        ({"topics": []}, r"topics=\[\]"),
        ({"topics": ["a", "a"]}, "each name once"),
        ({"topics": "t", "start": "first"}, "start='first'"),
        ({"topics": "t", "start": 5}, "start=5, expected 'earliest'"),
        ({"topics": "t", "start": datetime(2026, 1, 1)}, "without a time zone"),
        ({"topics": "t", "start": "committed"}, "without group_id="),
        ({"topics": "t", "start": datetime(2200, 1, 1, tzinfo=timezone.utc)}, "start= in the future"),
        ({"topics": "t", "start": Timestamp(5), "stop": Timestamp(4)}, "stop= before start=: 4000 and 5000 ms"),
        ({"topics": "t", "start": {0: 7, 1: 0}, "stop": {0: 6, 1: 0}}, r"stop= before start= in t\[0\]: 6 and 7"),
        ({"topics": "t", "stop": "latest"}, "stop='latest', expected 'now'"),
        ({"topics": "t", "stop": {}}, "stop={}"),
        ({"topics": "t", "stop": {0: -1}}, "the offset -1 of"),
        ({"topics": ["t", "u"], "stop": {0: 1}}, r"found 0 among the partitions of stop="),
        ({"topics": "t", "value": "xml"}, "value='xml'"),
        ({"topics": "t", "value": "avro"}, "without schema_registry="),
        ({"topics": "t", "value": {"type": "nothing"}}, "not an Avro schema"),
        ({"topics": "t", "value": "avro", "schema_registry": "http://me:hush@registry"}, "schema_registry_auth="),
        ({"topics": "t", "schema_registry_auth": "env:A"}, "both or neither"),
        ({"topics": "t", "value": "avro", "schema_registry": "http://r", "schema_registry_auth": "hush"}, "env:NAME"),
        ({"topics": "t", "as_table": True, "value": "json"}, "without schema="),
        ({"topics": "t", "as_table": True, "key": "json"}, "key='json', expected 'bytes' or 'utf8'"),
        ({"topics": "t", "as_table": True, "values_only": True}, "one of them"),
        ({"topics": "t", "as_table": True, "schema": pa.schema([("a", pa.int8())])}, "values with fields"),
        ({"topics": "t", "as_table": True, "value": "json", "schema": pa.schema([("_key", pa.int8())])}, "_key in"),
        ({"topics": "t", "schema": pa.schema([("a", pa.int8())])}, "without as_table=True"),
        ({"topics": "t", "timestamps": "event"}, "timestamps='event'"),
        ({"topics": "t", "max_out_of_orderness": -1}, "max_out_of_orderness=-1"),
        ({"topics": "t", "isolation_level": "none"}, "isolation_level='none'"),
        ({"topics": "t", "on_lost": "ignore"}, "on_lost='ignore'"),
        ({"topics": "t", "discover_every_s": 0}, "discover_every_s=0"),
        ({"topics": "t", "groups": 0}, "groups=0"),
        ({"topics": "t", "config": {"group.id": "g"}}, "use group_id="),
    ):
        with pytest.raises((InvalidArgument, InvalidType), match=message):
            ReadKafka(**{"bootstrap_servers": "one:9092", **arguments})  # type: ignore[arg-type]


def test_secrets_are_not_in_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "hush-hush")
    read = ReadKafka("one:9092", "t", secrets={"sasl.password": "env:KAFKA_PASSWORD"})
    pipeline = beam.Pipeline("DirectRunner")
    _ = pipeline | read
    assert b"hush-hush" not in pipeline.to_runner_api().SerializeToString()
    assert "hush-hush" not in repr(vars(read))
