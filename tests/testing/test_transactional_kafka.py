"""The broker with transactions, as producers and consumers of librdkafka see it."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from luminosity.errors import InvalidArgument, InvalidType
from luminosity.testing import TransactionalKafka
from luminosity.testing.transactional.log import PartitionLog
from luminosity.testing.transactional.wire import batch_at, marker


@pytest.fixture
def kafka() -> Iterator[TransactionalKafka]:
    with TransactionalKafka({"t": 2}) as made:
        yield made


def _producer(kafka: TransactionalKafka, name: str = "id", **settings: Any) -> Producer:
    made = Producer(
        {"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": name, "linger.ms": 0, "log_level": 0}
        | {key.replace("_", "."): value for key, value in settings.items()}
    )
    made.init_transactions(10)
    return made


def _write(producer: Producer, *values: str) -> None:
    producer.begin_transaction()
    for value in values:
        producer.produce("t", value, partition=0)
    assert producer.flush(10) == 0


def _values(kafka: TransactionalKafka, isolation_level: str = "read_committed") -> list[str]:
    return [(record.value or b"").decode() for record in kafka.consume("t", isolation_level=isolation_level)]


def test_aborted_records_are_hidden_and_open_ones_hold_back_those_behind(kafka: TransactionalKafka) -> None:
    one, other = _producer(kafka, "one"), _producer(kafka, "other")
    _write(one, "a", "b")
    _write(other, "c")
    other.commit_transaction(10)
    assert _values(kafka) == []
    one.abort_transaction(10)
    assert _values(kafka) == ["c"]
    _write(one, "d")
    one.commit_transaction(10)
    assert _values(kafka) == ["c", "d"]
    assert kafka.count("t") == 2
    assert _values(kafka, "read_uncommitted") == ["a", "b", "c", "d"]
    assert kafka.transactions == (2, 1)


def test_a_new_producer_ends_the_transaction_of_the_last_one_and_fences_it(kafka: TransactionalKafka) -> None:
    zombie = _producer(kafka)
    _write(zombie, "a")
    _write(_producer(kafka), "b")
    with pytest.raises(KafkaException, match="fenced"):
        zombie.commit_transaction(10)
    assert kafka.transactions == (0, 1)
    assert _values(kafka, "read_uncommitted") == ["a", "b"]


def test_offsets_are_committed_with_the_records_or_not_at_all(kafka: TransactionalKafka) -> None:
    producer = _producer(kafka)
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "g", "log_level": 0})
    for offset, end in ((3, producer.abort_transaction), (5, producer.commit_transaction)):
        _write(producer, str(offset))
        place = TopicPartition("t", 1, offset, f"at {offset}")
        producer.send_offsets_to_transaction([place], consumer.consumer_group_metadata(), 10)
        assert kafka.committed("g") == {}
        end(10)
        found = consumer.committed([TopicPartition("t", 1)], timeout=10)[0]
        assert found.offset == (offset if end == producer.commit_transaction else -1001)
    assert kafka.committed("g")["t", 1].metadata.rstrip("\0") == "at 5"
    kafka.forget_group("g")
    assert consumer.committed([TopicPartition("t", 1)], timeout=10)[0].offset == -1001
    consumer.close()


def test_a_transaction_that_is_open_for_too_long_is_aborted(kafka: TransactionalKafka) -> None:
    late = _producer(kafka, transaction_timeout_ms=1_000, message_timeout_ms=1_000)
    _write(late, "a")
    other = _producer(kafka, "other")
    _write(other, "b")
    other.commit_transaction(10)
    deadline = 100  # tries of 0.1 s at least
    while not _values(kafka) and deadline:
        deadline -= 1
    assert _values(kafka) == ["b"]
    with pytest.raises(KafkaException):
        late.commit_transaction(10)


def test_a_request_that_is_repeated_is_written_once(kafka: TransactionalKafka) -> None:
    producer = _producer(kafka)
    kafka.lose_answers("produce", 2)
    _write(producer, "a", "b")
    kafka.fail_requests("end_txn", "COORDINATOR_LOAD_IN_PROGRESS")
    kafka.lose_answers("end_txn")
    producer.commit_transaction(20)
    assert _values(kafka, "read_uncommitted") == ["a", "b"]
    assert kafka.transactions == (1, 0)


def test_a_broker_without_transactions() -> None:
    with TransactionalKafka({"t": 1}, transactions=False) as kafka:
        with pytest.raises(KafkaException, match="not support"):
            _producer(kafka)
        kafka.produce_many("t", ["a"])
        assert _values(kafka) == ["a"]


def test_a_timeout_beyond_that_of_the_broker() -> None:
    with (
        TransactionalKafka({"t": 1}, longest_transaction_s=10) as kafka,
        pytest.raises(KafkaException, match=r"INVALID_TRANSACTION_TIMEOUT|timeout is larger"),
    ):
        _producer(kafka)


def test_keys_choose_partitions_and_other_records_go_round(kafka: TransactionalKafka) -> None:
    kafka.produce_many("t", ["a", "b", "c", *(("k", str(n)) for n in range(20))])
    records = kafka.consume("t")
    assert [record.value for record in records if record.key is None] == [b"a", b"c", b"b"]
    assert len({record.partition for record in records if record.key == b"k"}) == 1
    assert [record.value for record in records if record.key == b"k"] == [b"%d" % n for n in range(20)]


def test_consumers_of_later_offsets_get_batches_that_have_them(kafka: TransactionalKafka) -> None:
    kafka.produce_many("t", [str(n) for n in range(1_000)])
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "g", "log_level": 0})
    assert consumer.get_watermark_offsets(TopicPartition("t", 0), timeout=10) == (0, 500)
    consumer.assign([TopicPartition("t", 0, 499)])
    (message,) = consumer.consume(1, 10)
    assert (message.offset(), message.value()) == (499, b"998")
    consumer.close()


def test_mistakes_are_named(kafka: TransactionalKafka) -> None:
    with pytest.raises(InvalidArgument, match="the topic 't', which exists"):
        kafka.create_topic("t")
    with pytest.raises(InvalidArgument, match="found partitions=0"):
        kafka.create_topic("new", 0)
    with pytest.raises(InvalidArgument, match="the kind of request 'poetry'"):
        kafka.fail_requests("poetry", "REQUEST_TIMED_OUT")
    with pytest.raises(InvalidType, match=r"kafka\.bootstrap_servers"):
        pickle.dumps(kafka)


def test_closing_twice_and_nonsense_on_a_connection(kafka: TransactionalKafka) -> None:
    host, _, port = kafka.bootstrap_servers.partition(":")
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", struct.pack(">ihhih", 10, 77, 0, 1, -1), struct.pack(">i", 3) + b"abc"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(nonsense)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
    kafka.produce_many("t", ["a"])
    kafka.close()
    kafka.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), timeout=10)


def test_a_log_refuses_what_is_no_batch_and_gaps_in_sequences() -> None:
    log = PartitionLog()
    assert log.append(b"nonsense")[0] == 2
    whole = marker(1, 0, offset=0, is_commit=True, timestamp=1)
    assert log.append(whole[:-1])[0] == 2
    header = batch_at(whole, 0)
    numbered = bytearray(whole)
    numbered[53:57] = struct.pack(">i", 7)  # the sequence number
    assert header.sequence == -1
    assert log.append(bytes(numbered))[0] == 45
    assert (log.end, log.bytes) == (0, 0)
