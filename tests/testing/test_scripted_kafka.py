"""ScriptedKafka: what consumers in any process see of a script."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import confluent_kafka
import pytest

from luminosity import LuminosityRunner, ReadKafka, WriteKafka
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.testing import ScriptedKafka
from tests.runners import start
from tests.streams import Notes, wait_for


@pytest.fixture
def kafka() -> Iterator[ScriptedKafka]:
    with ScriptedKafka({"t": 1}) as made:
        yield made


def consumer_of(kafka: ScriptedKafka, isolation: str = "read_committed", errors: Any = None) -> Any:
    on_error = (lambda error: None) if errors is None else lambda error: errors.append(error.name())
    settings = {"group.id": "g", "isolation.level": isolation}
    return pickle.loads(pickle.dumps(kafka.client)).consumer(settings, on_error)


def read(kafka: ScriptedKafka, isolation: str = "read_committed", at: int = 0) -> list[Any]:
    """Return offsets, or the names of errors with their offsets, up to the end of the partition."""
    consumer = consumer_of(kafka, isolation)
    consumer.assign([confluent_kafka.TopicPartition("t", 0, at)])
    found: list[Any] = []
    while (message := consumer.poll(0)) is not None:
        error = message.error()
        found.append(message.offset() if error is None else (error.name(), message.offset()))
    consumer.close()
    return found


def test_gaps_have_no_records(kafka: ScriptedKafka) -> None:
    kafka.produce_many("t", ["a", ("k", "b"), {"value": None, "offset": 7}])
    kafka.skip_offsets("t", 0, 2)
    assert read(kafka) == [0, 1, 7, ("_PARTITION_EOF", 10)]
    assert read(kafka, at=3) == [7, ("_PARTITION_EOF", 10)]
    with pytest.raises(InvalidArgument, match="found offset=9, expected 10 or more"):
        kafka.produce("t", "c", offset=9)


def test_transactions_are_seen_as_the_isolation_level_says(kafka: ScriptedKafka) -> None:
    kafka.produce("t", "a")
    kafka.produce("t", "b", transaction="one")
    kafka.produce("t", "c")
    assert read(kafka) == [0, ("_PARTITION_EOF", 1)], "records behind an open transaction wait"
    assert read(kafka, "read_uncommitted") == [0, 1, 2, ("_PARTITION_EOF", 3)]
    kafka.end_transaction("one", commit=False)
    kafka.produce("t", "d", transaction="one")
    kafka.end_transaction("one")
    assert read(kafka) == [0, 2, 4, ("_PARTITION_EOF", 6)]
    assert read(kafka, "read_uncommitted") == [0, 1, 2, 4, ("_PARTITION_EOF", 6)]
    with pytest.raises(InvalidArgument, match="no open transaction 'one'"):
        kafka.end_transaction("one")


def test_offsets_of_times_ends_and_beginnings(kafka: ScriptedKafka) -> None:
    kafka.produce_many("t", [{"value": "a", "timestamp": at} for at in (0, 500, 300, -1, 700)])
    kafka.delete_records("t", 0, 1)
    consumer = consumer_of(kafka)

    def offset(when: int) -> int:
        (found,) = consumer.offsets_for_times([confluent_kafka.TopicPartition("t", 0, when)], timeout=1)
        return found.offset

    assert [offset(when) for when in (-2, -1, 0, 300, 501, 701)] == [1, 5, 1, 1, 4, -1]
    assert consumer.get_watermark_offsets(confluent_kafka.TopicPartition("t", 0)) == (1, 5)
    assert read(kafka) == [("_AUTO_OFFSET_RESET", 0)], "retention has removed it"
    assert read(kafka, at=6) == [("_AUTO_OFFSET_RESET", 6)]
    gone = confluent_kafka.TopicPartition("none", 0, -1)
    with pytest.raises(confluent_kafka.KafkaException, match="_UNKNOWN_PARTITION"):
        consumer.offsets_for_times([gone], timeout=1)
    first, second = consumer.offsets_for_times([confluent_kafka.TopicPartition("t", 0, -1), gone], timeout=1)
    assert (first.offset, second.error.name()) == (5, "_UNKNOWN_PARTITION")


def test_reads_meet_errors_once(kafka: ScriptedKafka) -> None:
    kafka.produce_many("t", ["a", "b", {"value": "c", "offset": 4}])
    kafka.fail_reads("t", 0, "REQUEST_TIMED_OUT", confluent_kafka.KafkaError.UNKNOWN, at=3)
    expected = [0, 1, ("REQUEST_TIMED_OUT", 2), ("UNKNOWN", 2), 4, ("_PARTITION_EOF", 5)]
    assert read(kafka) == expected
    assert read(kafka) == [0, 1, 4, ("_PARTITION_EOF", 5)]
    with pytest.raises(InvalidArgument, match="did you mean 'REQUEST_TIMED_OUT'"):
        kafka.fail_reads("t", 0, "REQUEST_TIMEOUT")
    with pytest.raises(InvalidArgument, match=r"found no partition t\[1\]"):
        kafka.fail_reads("t", 1, "UNKNOWN")


def test_a_broker_that_is_away_or_refuses(kafka: ScriptedKafka) -> None:
    errors: list[str] = []
    consumer = consumer_of(kafka, errors=errors)
    kafka.stop_broker()
    with pytest.raises(confluent_kafka.KafkaException, match="_TRANSPORT"):
        consumer.list_topics(timeout=1)
    assert consumer.poll(0) is None
    assert errors == []
    kafka.refuse_clients("SASL_AUTHENTICATION_FAILED")
    assert consumer.poll(0) is None
    assert errors == ["SASL_AUTHENTICATION_FAILED"]
    kafka.start_broker()
    assert list(consumer.list_topics(timeout=1).topics) == ["t"]
    kafka.close()
    with pytest.raises(confluent_kafka.KafkaException, match="_TRANSPORT"):
        consumer.list_topics(timeout=1)


def test_groups_commit_offsets(kafka: ScriptedKafka) -> None:
    consumer = consumer_of(kafka)
    (unset,) = consumer.committed([confluent_kafka.TopicPartition("t", 0)], timeout=1)
    assert unset.offset == confluent_kafka.OFFSET_INVALID
    consumer.commit(offsets=[confluent_kafka.TopicPartition("t", 0, 5)], asynchronous=False)
    assert kafka.committed("g") == {("t", 0): 5}
    assert kafka.committed("other") == {}
    assert kafka.open_consumers == 1
    consumer.close()
    assert wait_for(lambda: kafka.open_consumers == 0)
    assert kafka.requests["commit"] == 1


def test_workers_follow_the_script_while_it_changes(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    with ScriptedKafka({"t": 1}) as kafka:
        kafka.produce("t", "a", transaction="one")

        def build(pipeline: beam.Pipeline) -> None:
            assert isinstance(pipeline.runner, LuminosityRunner)
            read = ReadKafka(kafka.client, "t", value="utf8", values_only=True, discover_every_s=0.2)
            _ = pipeline | read | notes.step(str)

        result: Any = start(build, "--cpu_workers=1")
        try:
            assert wait_for(lambda: kafka.requests["poll"] > 3)
            assert notes.read() == [], "its transaction is open"
            kafka.end_transaction("one")
            assert wait_for(lambda: notes.read() == ["a"])
            kafka.create_topic("t", 2)
            kafka.produce("t", "b", partition=1)
            kafka.fail_reads("t", 0, "NOT_LEADER_FOR_PARTITION")
            kafka.produce("t", "c")
            assert wait_for(lambda: sorted(notes.read()) == ["a", "b", "c"])
            kafka.stop_broker()
            kafka.produce("t", "d")
            kafka.start_broker()
            assert wait_for(lambda: "d" in notes.read())
        finally:
            result.cancel()
            result.wait_until_finish()
        assert wait_for(lambda: kafka.open_consumers == 0)


def test_what_a_script_can_not_do_is_said(kafka: ScriptedKafka) -> None:
    with pytest.raises(InvalidType, match=r"take kafka.client outside"):
        pickle.dumps(kafka)
    pipeline = beam.Pipeline(LuminosityRunner(), beam.options.pipeline_options.PipelineOptions(["--progress=off"]))
    with pytest.raises(InvalidArgument, match=r"write to luminosity.testing.KafkaBroker"):
        _ = pipeline | beam.Create(["a"]) | WriteKafka(kafka.client, "t")
    with pytest.raises(InvalidArgument, match="partitions=0, expected at least 1"):
        kafka.create_topic("u", 0)
    with pytest.raises(InvalidArgument, match="found a KafkaClient with config= or secrets="):
        ReadKafka(kafka.client, "t", config={"client.id": "a"})
