"""The step that commits batches: each batch is in the topic once, whatever fails, comes again, or wakes up late."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, TopicPartition

from luminosity.errors import KafkaError
from luminosity.testing import TransactionalKafka
from tests.io.kafka.exactly_once.sinks import CommitStep, States, batch, values

_DAY_S = 86_400


@pytest.fixture
def kafka() -> Iterator[TransactionalKafka]:
    with TransactionalKafka({"t": 1}) as made:
        yield made


def test_a_bundle_is_one_transaction_of_each_shard(kafka: TransactionalKafka) -> None:
    with CommitStep(kafka.bootstrap_servers) as step:
        step.begin(batch(0, "a", "b"), batch(1, "c"))
        step.process(batch(0, "d"), shard=1)
        assert values(kafka) == []
        assert step.finish() == 4
        assert kafka.transactions == (2, 0)
        assert step.bundle(batch(2, "e")) == 1
    assert sorted(values(kafka)) == ["a", "b", "c", "d", "e"]
    assert kafka.transactions == (3, 0)
    committed = kafka.committed("sink-0")["t", 0]
    assert committed.offset == 3
    assert json.loads(committed.metadata.rstrip("\0")) == {"run": "run", "starts": [["start--1", 0]]}


def test_what_comes_again_after_a_crash_is_skipped_and_counted(kafka: TransactionalKafka) -> None:
    with CommitStep(kafka.bootstrap_servers) as first:
        assert first.bundle(batch(0, "a"), batch(1, "b", "c")) == 3
    with CommitStep(kafka.bootstrap_servers) as second:  # with the state of an older checkpoint
        assert second.bundle(batch(0, "a"), batch(1, "b", "c"), batch(2, "d", start="start--2")) == 4
    assert values(kafka) == ["a", "b", "c", "d"]
    assert kafka.transactions == (2, 0)


def test_a_bundle_of_repeated_batches_needs_no_transaction(kafka: TransactionalKafka) -> None:
    with CommitStep(kafka.bootstrap_servers) as first:
        first.bundle(batch(0, "a"))
    with CommitStep(kafka.bootstrap_servers) as second:
        assert second.bundle(batch(0, "a")) == 1
    assert kafka.transactions == (1, 0)


def test_batches_that_come_before_their_turn_wait(kafka: TransactionalKafka) -> None:
    with CommitStep(kafka.bootstrap_servers) as step:
        assert step.bundle(batch(2, "c"), batch(4, "e")) == 0
        assert step.bundle(batch(0, "a")) == 1
        assert step.bundle(batch(1, "b"), batch(1, "b")) == 2
        assert step.bundle(batch(3, "d")) == 2
        assert step.states.early[0].values == []
    assert values(kafka) == ["a", "b", "c", "d", "e"]


def test_a_crash_before_the_commit_leaves_nothing_to_see(kafka: TransactionalKafka) -> None:
    dead = CommitStep(kafka.bootstrap_servers)
    dead.begin(batch(0, "a"))
    dead.step._producers[0]._producer.flush(10)
    with CommitStep(kafka.bootstrap_servers) as step:
        assert step.bundle(batch(0, "a"), batch(1, "b")) == 2
    assert values(kafka) == ["a", "b"]
    assert values(kafka, "read_uncommitted") == ["a", "a", "b"]


def test_a_bundle_that_failed_elsewhere_is_aborted_when_it_is_repeated(kafka: TransactionalKafka) -> None:
    with CommitStep(kafka.bootstrap_servers) as step:
        step.begin(batch(0, "a"))
        step.states = States()  # the bundle has failed in a step behind
        assert step.bundle(batch(0, "a")) == 1
        assert values(kafka) == ["a"]


def test_a_zombie_is_fenced_and_a_retry_of_it_skips(kafka: TransactionalKafka) -> None:
    with CommitStep(kafka.bootstrap_servers) as zombie, CommitStep(kafka.bootstrap_servers) as step:
        zombie.begin(batch(0, "a"))
        assert step.bundle(batch(0, "a"), batch(1, "b")) == 2
        with pytest.raises(KafkaError, match=r"'sink-0' can't be committed.*_FENCED") as caught:
            zombie.finish()
        assert caught.value.may_pass
        zombie.states = States()
        assert zombie.bundle(batch(0, "a"), batch(1, "b")) == 2
        with pytest.raises(KafkaError, match="_FENCED"):
            step.bundle(batch(2, "c"))
    assert values(kafka) == ["a", "b"]


def test_a_shard_may_move_to_another_worker_and_back(kafka: TransactionalKafka) -> None:
    states = States()
    with CommitStep(kafka.bootstrap_servers, states) as one, CommitStep(kafka.bootstrap_servers, states) as other:
        assert one.bundle(batch(0, "a")) == 1
        assert other.bundle(batch(1, "b")) == 1
        assert one.bundle(batch(2, "c")) == 1
    assert values(kafka) == ["a", "b", "c"]
    assert kafka.transactions == (3, 0)


@pytest.mark.parametrize("request_kind", ["end_txn", "txn_offset_commit", "add_offsets_to_txn", "produce"])
def test_an_answer_that_is_lost_changes_nothing(kafka: TransactionalKafka, request_kind: str) -> None:
    with CommitStep(kafka.bootstrap_servers) as step:
        step.bundle(batch(0, "a"))
        kafka.lose_answers(request_kind)
        assert step.bundle(batch(1, "b")) == 1
        assert step.bundle(batch(2, "c")) == 1
    assert values(kafka) == ["a", "b", "c"]


def test_a_commit_whose_end_is_unknown_is_found_out_by_the_retry(kafka: TransactionalKafka) -> None:
    with CommitStep(kafka.bootstrap_servers, timeout_s=1) as step:
        kafka.lose_answers("end_txn", 1_000)
        step.begin(batch(0, "a"))
        with pytest.raises(KafkaError, match="can't be committed") as caught:
            step.finish()
        assert caught.value.may_pass
        kafka.lose_answers("end_txn", 0)
        step.states = States()
        assert step.bundle(batch(0, "a"), batch(1, "b")) == 2
    assert values(kafka) == ["a", "b"]


def test_a_record_that_is_refused_is_named(kafka: TransactionalKafka) -> None:
    with CommitStep(kafka.bootstrap_servers) as step:
        kafka.fail_requests("produce", "MSG_SIZE_TOO_LARGE")
        step.begin(batch(0, "too large"))
        with pytest.raises(KafkaError, match=r"does not take a record: t\[0\], no key, 9 bytes.*MSG_SIZE") as caught:
            step.finish()
        assert not caught.value.may_pass
        step.states = States()
        assert step.bundle(batch(0, "smaller")) == 1
    assert values(kafka) == ["smaller"]


def test_another_run_with_the_same_name_is_refused(kafka: TransactionalKafka) -> None:
    with CommitStep(kafka.bootstrap_servers) as first, CommitStep(kafka.bootstrap_servers, run="other") as other:
        first.bundle(batch(0, "a"))
        with pytest.raises(KafkaError, match=r"found exactly_once='sink', which another run has used \(run\)"):
            other.bundle(batch(0, "x"))
    assert values(kafka) == ["a"]


def test_a_checkpoint_that_is_older_than_the_topic_is_refused(kafka: TransactionalKafka) -> None:
    with CommitStep(kafka.bootstrap_servers) as first:
        first.bundle(batch(0, "a", start="start--1"), batch(1, "b", start="start--2"), batch(2, "c", start="start--2"))
    with CommitStep(kafka.bootstrap_servers) as second:
        assert second.bundle(batch(0, "a", start="start--1"), batch(1, "b", start="start--2")) == 2
        with pytest.raises(KafkaError, match=r"found batches 2 to 2 of 'sink-0' in Kafka.*does not know"):
            second.begin(batch(2, "x", start="start--3"))
    assert values(kafka) == ["a", "b", "c"]


def test_a_checkpoint_from_before_many_starts_is_refused_as_well(kafka: TransactionalKafka) -> None:
    states = older = States()
    with CommitStep(kafka.bootstrap_servers, states) as first:
        for number in range(25):  # Kafka remembers who made the last 20 of them.
            first.bundle(batch(number, str(number), start=f"start-{number:02}"))
            older = older if number else copy.deepcopy(states)
    with CommitStep(kafka.bootstrap_servers, older) as second:
        with pytest.raises(KafkaError, match=r"found batches 1 to 24 of 'sink-0' in Kafka.*does not know") as caught:
            second.begin(batch(1, "x", start="start-99"))
        assert "continue with another name as exactly_once=" in str(caught.value)
    assert values(kafka) == [str(number) for number in range(25)]


def test_a_checkpoint_that_is_older_than_the_topic_continues_with_another_name(kafka: TransactionalKafka) -> None:
    states = States()
    with CommitStep(kafka.bootstrap_servers, states) as first:
        first.bundle(batch(0, "a"))
        older = copy.deepcopy(states)
        first.bundle(batch(1, "b"))
    with CommitStep(kafka.bootstrap_servers, older, name="sink-2") as second:
        # The savepoint has batch 1 as well, which waits since then.
        assert second.bundle(batch(1, "b", at=time.time() - _DAY_S - 1)) == 1
        assert second.bundle(batch(2, "c")) == 1
    assert values(kafka) == ["a", "b", "b", "c"]


def test_a_group_that_brokers_have_forgotten(kafka: TransactionalKafka) -> None:
    states = States()
    with CommitStep(kafka.bootstrap_servers, states) as first:
        first.bundle(batch(0, "a"))
        kafka.forget_group("sink-0")
        assert first.bundle(batch(1, "b")) == 1  # a producer that is open knows
    kafka.forget_group("sink-0")
    with CommitStep(kafka.bootstrap_servers, states) as second:
        with pytest.raises(KafkaError, match="batch 2 waits for more than 24 hours"):
            second.begin(batch(2, "c", at=time.time() - _DAY_S - 1))
        assert second.bundle(batch(2, "c")) == 1
    assert values(kafka) == ["a", "b", "c"]


def test_a_group_that_has_lost_a_commit_is_an_error(kafka: TransactionalKafka) -> None:
    states = States()
    with CommitStep(kafka.bootstrap_servers, states) as first:
        first.bundle(batch(0, "a"))
        before = kafka.committed("sink-0")["t", 0]
        first.bundle(batch(1, "b"))
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "sink-0"})
    place = TopicPartition("t", 0, before.offset, before.metadata.rstrip("\0"))
    consumer.commit(offsets=[place], asynchronous=False)
    consumer.close()
    with (
        CommitStep(kafka.bootstrap_servers, states) as second,
        pytest.raises(KafkaError, match="found the number 1 in the group 'sink-0', expected 2"),
    ):
        second.begin(batch(2, "c"))


def test_a_group_of_somebody_else_is_refused(kafka: TransactionalKafka) -> None:
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "sink-0"})
    consumer.commit(offsets=[TopicPartition("t", 0, 5)], asynchronous=False)
    consumer.close()
    with (
        CommitStep(kafka.bootstrap_servers) as step,
        pytest.raises(KafkaError, match="that no sink has committed") as caught,
    ):
        step.begin(batch(0, "a"))
    assert "pass another name" in str(caught.value)
