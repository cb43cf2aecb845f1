"""Tests of Kafka → Map → Kafka: every record at least once, in order within a key, whatever fails on the way."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import KafkaRecord, LuminosityRunner, ReadKafka, WriteKafka
from luminosity.testing import KafkaBroker
from tests.marks import note, wait_for_file
from tests.processes import MOST_KILLS, kill_workers_of

KEYS = 7


@pytest.fixture
def broker() -> Iterator[KafkaBroker]:
    with KafkaBroker({"in": 4, "out": 4}, brokers=2) as broker:
        yield broker


def produce(broker: KafkaBroker, start: int, stop: int) -> None:
    broker.produce_many("in", [(f"key-{n % KEYS}", str(n)) for n in range(start, stop)])


def new_pipeline() -> beam.Pipeline:
    return beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", "--cpu_workers=2"]))


def assert_all_in_order(broker: KafkaBroker, count: int) -> None:
    """Repeated records are allowed; the first of each must be in order within its key."""
    by_key: dict[Any, list[int]] = {}
    for record in broker.consume("out"):
        by_key.setdefault(record.key, []).append(int(record.value))
    for key in range(KEYS):
        first = list(dict.fromkeys(by_key[b"key-%d" % key]))
        assert first == list(range(key, count, KEYS))


@pytest.mark.alone
def test_a_backfill_while_workers_are_killed(broker: KafkaBroker, tmp_path: Path) -> None:
    servers, at_work, killed = broker.bootstrap_servers, tmp_path / "at-work", tmp_path / "killed"
    produce(broker, 0, 400)

    def slowly(record: KafkaRecord) -> KafkaRecord:
        note(at_work, os.getpid())
        time.sleep(0.005)
        if record.value == b"399":
            wait_for_file(killed)
        return record

    pipeline = new_pipeline()
    records = pipeline | ReadKafka(servers, "in", stop="now")
    _ = records | beam.Map(slowly).with_output_types(KafkaRecord) | WriteKafka(servers, "out")
    with kill_workers_of(os.getpid(), every_s=0.4, at_work=at_work, over=killed) as kills:
        pipeline.run().wait_until_finish()
    assert kills.count == MOST_KILLS
    assert_all_in_order(broker, 400)


def test_a_stream_while_brokers_leave_leaders_change_and_requests_fail(broker: KafkaBroker) -> None:
    servers = broker.bootstrap_servers
    produce(broker, 0, 100)
    pipeline = new_pipeline()
    records = pipeline | ReadKafka(servers, "in", groups=2)
    _ = records | beam.Map(lambda record: record) | WriteKafka(servers, "out")
    result = pipeline.run()
    try:
        broker.consume("out", 100, timeout_s=60)
        broker.fail_requests("fetch", "NOT_LEADER_FOR_PARTITION", "_TRANSPORT", "REQUEST_TIMED_OUT")
        broker.fail_requests("metadata", "LEADER_NOT_AVAILABLE")
        produce(broker, 100, 200)
        broker.consume("out", 200, timeout_s=60)
        for partition in range(4):
            broker.set_leader("in", partition, 1)
            broker.set_leader("out", partition, 2)
        produce(broker, 200, 300)
        broker.consume("out", 300, timeout_s=60)
        broker.stop_broker()
        time.sleep(10)  # long enough that all clients notice, try again, and wait
        broker.start_broker()
        produce(broker, 300, 400)
        broker.consume("out", 400, timeout_s=60)
    finally:
        result.cancel()
    assert_all_in_order(broker, 400)


def test_records_of_odd_kinds_pass_unchanged(broker: KafkaBroker) -> None:
    servers = broker.bootstrap_servers
    headers = [("a", b"1"), ("a", b"2"), ("none", None), ("empty", b"")]
    broker.produce("in", None, key="tombstone", headers=headers, timestamp=1_700_000_000_000, partition=0)
    broker.produce("in", b"", timestamp=1, partition=0)
    broker.produce("in", b"x" * 1_000_000, key=b"", timestamp=2, partition=0)
    broker.produce("in", "no time", key=b"\xff\x00", timestamp=-1, partition=0)
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        records = pipeline | ReadKafka(servers, "in", stop="now")
        _ = records | WriteKafka(servers, "out", partition=lambda record: record.partition)
    given, found = broker.consume("in"), broker.consume("out")
    assert [record[5:] for record in found] == [record[5:] for record in given]
    assert [record.timestamp for record in found[:3]] == [1_700_000_000_000, 1, 2]
    assert found[3].timestamp > 1_700_000_000_000, "a record without a timestamp gets the time of writing"
