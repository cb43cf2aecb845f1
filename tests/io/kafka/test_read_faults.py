"""ReadKafka in pipelines when retention overtakes it, others share its group, and what follows is slow."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import confluent_kafka
import pytest
from apache_beam.testing.util import assert_that, equal_to

from luminosity import KafkaClient, ReadKafka
from luminosity.errors import StepFailed
from luminosity.io.kafka.consumer import ConsumerSettings
from luminosity.testing import KafkaBroker
from tests.both_runners import counters
from tests.marks import note, notes, wait_for_file
from tests.runners import run, start
from tests.streams import wait_for


@pytest.fixture
def broker() -> Iterator[KafkaBroker]:
    with KafkaBroker({"t": 1, "many": 3}) as broker:
        yield broker


def test_retention_that_overtook_the_offset_is_an_error_or_skipped(broker: KafkaBroker) -> None:
    for n in range(20):  # The mock broker removes whole batches.
        broker.produce("t", str(n))
    broker.delete_records("t", 0, 12)
    servers, begin, stop = broker.bootstrap_servers, {0: 5}, {0: 18}
    numbers = (
        r"t\[0\] begins at offset 12, but offset 5 was to be read: 7 offsets were removed by the topic's retention"
    )
    with pytest.raises(StepFailed, match=numbers):
        run(lambda p: p | ReadKafka(servers, "t", start=begin, stop=stop), "--cpu_workers=1")

    def build(pipeline: beam.Pipeline) -> None:
        read = ReadKafka(servers, "t", start=begin, stop=stop, on_lost="skip", value="utf8", values_only=True)
        assert_that(pipeline | read, equal_to([str(n) for n in range(12, 18)]))

    assert counters(run(build, "--debug"))["records_lost"] == 7


def test_others_in_the_group_take_no_partition_away(broker: KafkaBroker) -> None:
    """A member that subscribes, and a second read with the same group: each of them has all records."""
    broker.produce_many("many", [{"value": str(n), "partition": n % 3} for n in range(30)])
    servers = broker.bootstrap_servers
    settings = {"bootstrap.servers": servers, "group.id": "g", "auto.offset.reset": "earliest"}
    member = confluent_kafka.Consumer({**settings, "enable.auto.commit": False})
    member.subscribe(["many"])
    assert wait_for(lambda: member.poll(0.1) is not None), "it is a member"

    def build(pipeline: beam.Pipeline) -> None:
        for name in ("One", "Two"):
            values = pipeline | name >> ReadKafka(servers, "many", stop="now", group_id="g", values_only=True)
            assert_that(values, equal_to([b"%d" % n for n in range(30)]), label=f"Check{name}")

    try:
        run(build, "--cpu_workers=1")
    finally:
        member.close()


def test_offsets_of_a_group_are_kept_when_two_runs_share_it(broker: KafkaBroker) -> None:
    servers = broker.bootstrap_servers

    def read(expected: range) -> None:
        def build(pipeline: beam.Pipeline) -> None:
            values = pipeline | ReadKafka(
                servers, "t", start="committed", stop="now", group_id="g", value=int, values_only=True
            )
            assert_that(values, equal_to([*expected]))

        run(build, "--debug")

    broker.produce_many("t", [str(n) for n in range(5)])
    read(range(5))
    broker.produce_many("t", [str(n) for n in range(5, 9)])
    read(range(5, 9))


def test_a_consumer_that_is_not_polled_holds_a_bounded_number_of_bytes() -> None:
    """What librdkafka has fetched, as it counts it itself, over topics with far more."""
    partitions, limit = 24, 2_000_000
    found: list[int] = []

    def stats(text: str) -> None:
        listed = json.loads(text)["topics"].get("t", {}).get("partitions", {})
        found.append(max((each["fetchq_size"] for each in listed.values()), default=0))  # They share one queue.

    with KafkaBroker({"t": partitions}) as broker:
        for _ in range(4):
            broker.produce_many("t", [{"value": b"x" * 500_000, "partition": n} for n in range(partitions)])
        client = KafkaClient(broker.bootstrap_servers, {"queued.max.messages.kbytes": limit // 1000})
        settings = ConsumerSettings(client, None, "read_committed", 60.0, "test").settings()
        consumer = client.consumer({**settings, "statistics.interval.ms": 20, "stats_cb": stats}, lambda error: None)
        consumer.assign([confluent_kafka.TopicPartition("t", n, 0) for n in range(partitions)])
        assert wait_for(lambda: consumer.poll(0.1) is not None)
        assert wait_for(lambda: (consumer.poll(0), len(found) > 50 and max(found) >= limit)[1])
        consumer.close()
    assert max(found) <= 3 * limit, "what it may hold, and two responses that were on their way"


def test_a_slow_sink_holds_the_source_back(tmp_path: Path) -> None:
    """The sink waits until the source stands still. What lies between them is bounded, and nothing of it is lost."""
    count, size, budget = 600, 100_000, 24_000_000
    read, written, go = tmp_path / "read", tmp_path / "written", tmp_path / "go"

    def see(record: Any) -> Any:
        note(read)
        return record

    def write(record: Any) -> None:
        wait_for_file(go)
        note(written, f"{record.partition} {record.offset}")

    with KafkaBroker({"t": 20}) as broker:
        broker.produce_many("t", [{"value": b"x" * size, "partition": n % 20} for n in range(count)])

        def build(pipeline: beam.Pipeline) -> None:
            records = pipeline | ReadKafka(broker.bootstrap_servers, "t", groups=2) | beam.Map(see)
            _ = records | beam.Reshuffle() | "Write" >> beam.Map(write)

        result: Any = start(build, "--cpu_workers=2", f"--memory_budget={budget}")
        try:
            assert wait_for(lambda: notes(read) != [])
            seen = -1
            while seen < len(notes(read)):
                seen = len(notes(read))
                time.sleep(1)
            go.touch()
            assert wait_for(lambda: len(notes(written)) >= count)
        finally:
            result.cancel()
    assert seen * size <= 2 * budget, "far less than there is"
    assert len(set(notes(written))) == count
