"""Tests of WriteKafka when brokers, requests, other steps or workers fail: every record at least once, and in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner, WriteKafka
from luminosity.errors import KafkaError, StepFailed, may_pass
from luminosity.testing import KafkaBroker
from tests.io.kafka.steps import WriteStep, values
from tests.marks import first_time, note, wait_for_file
from tests.processes import MOST_KILLS, kill_workers_of

SMALL_BATCHES = {"batch.num.messages": 10, "linger.ms": 1}  # so that several requests are in flight


@pytest.fixture
def broker() -> Iterator[KafkaBroker]:
    with KafkaBroker({"t": 1, "many": 4}, brokers=3) as broker:
        yield broker


def numbers(start: int, stop: int) -> list[tuple[str, str]]:
    return [("k", str(n)) for n in range(start, stop)]


def encoded(stop: int) -> list[bytes]:
    return [b"%d" % n for n in range(stop)]


def test_a_broker_that_is_away_for_a_while_is_waited_for(broker: KafkaBroker) -> None:
    with WriteStep(broker) as step:
        step.bundle(*numbers(0, 100))
        broker.stop_broker()
        step.step.start_bundle()
        for element in numbers(100, 200):
            step.process(element)
        outputs: list[Any] = []
        waiting = threading.Thread(target=lambda: outputs.extend(step.finish()), daemon=True)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive(), "the bundle does not end before Kafka has its records"
        broker.start_broker()
        waiting.join(60)
        assert outputs == [("t", 100)]
    assert values(broker) == encoded(200)


def test_a_leader_that_changes_again_and_again(broker: KafkaBroker) -> None:
    with WriteStep(broker, config=SMALL_BATCHES) as step:
        step.step.start_bundle()
        for number, element in enumerate(numbers(0, 600)):
            if number % 150 == 0:
                broker.set_leader("t", 0, number // 150 % 3 + 1)
            step.process(element)
        assert step.finish() == [("t", 600)]
    assert values(broker) == encoded(600), "each record once, in order"


@pytest.mark.parametrize("letters", [False, True])
@pytest.mark.parametrize(
    ("kind", "errors"),
    [
        (
            "produce",
            [
                "NOT_LEADER_FOR_PARTITION",
                "_TRANSPORT",
                "REQUEST_TIMED_OUT",
                "NOT_ENOUGH_REPLICAS",
                "LEADER_NOT_AVAILABLE",
            ],
        ),
        ("metadata", ["LEADER_NOT_AVAILABLE", "_TRANSPORT"]),
        ("init_producer_id", ["COORDINATOR_LOAD_IN_PROGRESS", "_TRANSPORT"]),
    ],
    ids=["produce", "metadata", "init_producer_id"],
)
def test_requests_that_fail_are_repeated(broker: KafkaBroker, kind: str, errors: list[str], letters: bool) -> None:
    broker.fail_requests(kind, *errors)
    with WriteStep(broker, letters=letters, config=SMALL_BATCHES) as step:
        assert step.bundle(*numbers(0, 200)) == [("t", 200)]
    assert values(broker) == encoded(200), "each record once, in order"


def test_a_client_without_rights_is_told_at_once(broker: KafkaBroker) -> None:
    broker.fail_requests("produce", "TOPIC_AUTHORIZATION_FAILED")
    with WriteStep(broker) as step, pytest.raises(KafkaError, match="TOPIC_AUTHORIZATION_FAILED") as caught:
        step.bundle("a")
    assert not may_pass(caught.value)


def test_records_after_a_failed_attempt_are_in_order(broker: KafkaBroker) -> None:
    """The first attempt fails in another step. What it left in its queue must not come behind the second attempt."""
    with WriteStep(broker, config={"linger.ms": 1_000}) as step:
        step.step.start_bundle()
        for element in numbers(0, 50):
            step.process(element)
        assert step.bundle(*numbers(0, 100)) == [("t", 100)]
    found = values(broker)
    assert found[-100:] == encoded(100)


# ---- with workers


def run(pipeline_of: Any, *flags: str) -> None:
    pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", "--cpu_workers=2", *flags]))
    pipeline_of(pipeline)
    pipeline.run().wait_until_finish()


@pytest.mark.alone
def test_every_record_at_least_once_and_in_order_while_workers_are_killed(broker: KafkaBroker, tmp_path: Path) -> None:
    servers, at_work, killed = broker.bootstrap_servers, tmp_path / "at-work", tmp_path / "killed"
    keys, each = 60, 20

    def records(key: int) -> Iterator[tuple[str, str]]:
        note(at_work, os.getpid())
        for n in range(each):
            time.sleep(0.002)
            yield f"key-{key}", str(n)
        if key == keys - 1:
            wait_for_file(killed)

    def build(pipeline: beam.Pipeline) -> None:
        found = pipeline | beam.Create(range(keys)) | beam.Reshuffle() | beam.FlatMap(records)
        _ = found | WriteKafka(servers, "many")

    with kill_workers_of(os.getpid(), every_s=0.4, at_work=at_work, over=killed) as kills:
        run(build)
    assert kills.count == MOST_KILLS
    written = broker.consume("many")
    for key in range(keys):
        mine = [int(record.value) for record in written if record.key == b"key-%d" % key]
        assert list(dict.fromkeys(mine)) == list(range(each)), "each is there, and first came in order"


def test_a_bundle_is_retried_until_kafka_has_its_records(broker: KafkaBroker, tmp_path: Path) -> None:
    servers, failed = broker.bootstrap_servers, tmp_path / "failed"

    def fail_once(n: int) -> str:
        if n == 30 and first_time(failed):
            raise ValueError("not yet")
        return str(n)

    run(lambda p: p | beam.Create(range(50)) | beam.Map(fail_once) | WriteKafka(servers, "many"))
    assert failed.exists()
    assert {record.value for record in broker.consume("many")} == set(encoded(50))


def test_a_run_ends_with_what_kafka_says(broker: KafkaBroker) -> None:
    servers = broker.bootstrap_servers
    broker.fail_requests("produce", "TOPIC_AUTHORIZATION_FAILED")
    with pytest.raises(StepFailed, match=r"many\[\d\], no key, 1 bytes: .*TOPIC_AUTHORIZATION_FAILED"):
        run(lambda p: p | beam.Create(["a"]) | WriteKafka(servers, "many"))
    assert broker.consume("many") == []
