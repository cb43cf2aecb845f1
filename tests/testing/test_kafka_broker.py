from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from typing import Any

import confluent_kafka
import pytest

from luminosity.errors import InvalidArgument, InvalidType, KafkaError
from luminosity.testing import KafkaBroker, mock_cluster


def values(broker: KafkaBroker, topic: str = "t", count: int | None = None) -> list[bytes | None]:
    return [record.value for record in broker.consume(topic, count)]


def test_a_record_comes_back_whole() -> None:
    headers = [("lang", b"en"), ("lang", b"de"), ("empty", b""), ("none", None)]
    with KafkaBroker({"t": 3}) as broker:
        broker.produce("t", "text", key=b"\xff", headers=headers, timestamp=1_700_000_000_123, partition=2)
        (record,) = broker.consume("t")
    assert (record.topic, record.partition, record.offset) == ("t", 2, 0)
    assert (record.timestamp, record.key, record.value) == (1_700_000_000_123, b"\xff", b"text")
    assert record.headers == tuple(headers)


def test_records_of_odd_kinds() -> None:
    with KafkaBroker({"t": 1}) as broker:
        broker.produce_many(
            "t", [None, b"", "", ("key", None), (b"", "x"), (None, b"\x00"), {"value": b"v" * 1_000_000}]
        )
        records = broker.consume("t")
    assert [(record.key, record.value and record.value[:2]) for record in records] == [
        (None, None),
        (None, b""),
        (None, b""),
        (b"key", None),
        (b"", b"x"),
        (None, b"\x00"),
        (None, b"vv"),
    ]
    assert len(records[-1].value or b"") == 1_000_000


def test_a_record_without_a_timestamp() -> None:
    with KafkaBroker({"t": 1}) as broker:
        broker.produce("t", "a", timestamp=-1)
        assert [record.timestamp for record in broker.consume("t")] == [-1]
        with pytest.raises(InvalidArgument, match="timestamp=0, which means now"):
            broker.produce("t", "a", timestamp=0)


def test_records_of_a_key_have_one_partition_and_stay_in_order() -> None:
    with KafkaBroker({"t": 4}) as broker:
        broker.produce_many("t", [(f"key-{n % 10}", str(n)) for n in range(1_000)])
        records = broker.consume("t")
    assert len({record.partition for record in records}) == 4
    for key in range(10):
        mine = [record for record in records if record.key == b"key-%d" % key]
        assert len({record.partition for record in mine}) == 1
        assert [int(record.value or b"") for record in mine] == list(range(key, 1_000, 10))


def test_two_brokers_know_nothing_of_each_other() -> None:
    with KafkaBroker({"t": 1}) as one, KafkaBroker({"t": 1}) as other:
        one.produce("t", "one")
        other.produce("t", "other")
        assert (values(one), values(other)) == ([b"one"], [b"other"])


def test_another_process_reads_and_writes() -> None:
    program = """
import sys
from confluent_kafka import Producer
producer = Producer({"bootstrap.servers": sys.argv[1]})
producer.produce("t", b"from afar")
assert producer.flush(30) == 0
"""
    with KafkaBroker({"t": 1}) as broker:
        subprocess.run([sys.executable, "-c", program, broker.bootstrap_servers], check=True, timeout=60)
        assert values(broker, count=1) == [b"from afar"]


def test_a_forked_process_leaves_the_broker_alone() -> None:
    with KafkaBroker({"t": 1}) as broker:
        child = os.fork()
        if child == 0:
            broker.close()  # The threads that would stop are not in this process: a wait would last.
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        broker.produce("t", "a")
        assert values(broker) == [b"a"]


def test_a_broker_that_is_never_closed_ends_with_its_process() -> None:
    """The process ends with its own exit code, says nothing, and its addresses are free again."""
    program = """
import runpy, socket, sys
mock = runpy.run_path(sys.argv[1])["MockCluster"](2)
mock.create_topic("t", 1, 1)
for address in mock.addresses.split(","):
    host, port = address.split(":")
    socket.create_connection((host, int(port)), 30).close()
    print(host, port)
sys.exit(7)
"""
    command = [sys.executable, "-c", program, mock_cluster.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (7, "")
    addresses = [line.split() for line in done.stdout.splitlines()]
    assert len(addresses) == 2
    for host, port in addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), 30)


def test_a_stopped_broker_comes_back_with_its_records() -> None:
    with KafkaBroker({"t": 1}, brokers=2) as broker:
        broker.produce("t", "before")
        broker.stop_broker()
        with pytest.raises(KafkaError, match=r"t: 1 records were not delivered within 0.3 s"):
            broker.produce("t", "lost", timeout_s=0.3)
        broker.start_broker()
        broker.produce("t", "after")
        assert values(broker) == [b"before", b"after"]


def test_one_of_two_brokers_is_enough_after_a_change_of_leader() -> None:
    with KafkaBroker({"t": 1}, brokers=2) as broker:
        broker.set_leader("t", 0, 1)
        broker.produce("t", "by 1")
        broker.set_leader("t", 0, 2)
        broker.stop_broker(1)
        broker.produce("t", "by 2")
        assert values(broker) == [b"by 1", b"by 2"]


def test_requests_fail_with_the_given_errors() -> None:
    with KafkaBroker({"t": 1}) as broker:
        broker.fail_requests("produce", "MSG_SIZE_TOO_LARGE")
        with pytest.raises(KafkaError, match=r"t\[0\]: .*[Mm]essage size too large"):
            broker.produce("t", "a")
        broker.fail_requests("produce", confluent_kafka.KafkaError.MSG_SIZE_TOO_LARGE)
        broker.clear_failures("produce")
        broker.produce("t", "b")
        broker.fail_requests("fetch", "not_leader_for_partition", "_TRANSPORT")
        assert values(broker) == [b"b"]


def test_old_records_are_deleted() -> None:
    with KafkaBroker({"t": 1}) as broker:
        for value in "abc":
            broker.produce("t", value)
        broker.delete_records("t", 0, 2)
        assert [(record.offset, record.value) for record in broker.consume("t")] == [(2, b"c")]


def test_records_that_the_broker_dropped_are_not_passed_over_in_silence() -> None:
    with KafkaBroker({"t": 1}) as broker:
        for _ in range(7):
            broker.produce("t", b"x" * 1_000_000)
        with pytest.raises(
            KafkaError, match=r"t\[0\]: the broker has dropped the records before offset \d: .*complete=False"
        ):
            broker.consume("t")
        assert 0 < len(broker.consume("t", complete=False)) < 7


def test_a_group_gets_its_partitions_at_once_and_commits() -> None:
    with KafkaBroker({"t": 1}) as broker:
        broker.produce_many("t", ["a", "b", "c"])
        settings: dict[str, Any] = {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
        consumer = confluent_kafka.Consumer(settings)
        consumer.subscribe(["t"])
        message = consumer.poll(30)
        assert message is not None
        assert message.value() == b"a"
        consumer.commit(message, asynchronous=False)
        consumer.close()
        other = confluent_kafka.Consumer(settings)
        (committed,) = other.committed([confluent_kafka.TopicPartition("t", 0)], timeout=30)
        other.close()
        assert committed.offset == 1


def test_waiting_for_more_records_than_there_are_ends() -> None:
    with KafkaBroker({"t": 1}) as broker:
        broker.produce("t", "a")
        with pytest.raises(KafkaError, match=r"t: found [01] records, expected 2 within 5 s"):
            broker.consume("t", 2, timeout_s=5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda broker: broker.create_topic("t", 2), r"topic_create\(t, 2, 1\).*TOPIC_ALREADY_EXISTS"),
        (lambda broker: broker.create_topic("u", 0), "partitions=0, expected at least 1"),
        (lambda broker: broker.stop_broker(2), r"broker_set_down\(2\)"),
        (lambda broker: broker.set_leader("t", 5, 1), r"partition_set_leader\(t, 5, 1\)"),
        (lambda broker: broker.fail_requests("fetsch", 1), "'fetsch', expected one of produce, fetch"),
        (lambda broker: broker.fail_requests("fetch"), "found no errors"),
        (lambda broker: broker.fail_requests("fetch", "REQUEST_TIMEOUT"), "did you mean 'REQUEST_TIMED_OUT'"),
        (lambda broker: broker.produce_many("t", [{"valeu": 1}]), r"found \['valeu'\]"),
        (lambda _: KafkaBroker(brokers=0), "brokers=0, expected at least 1"),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with KafkaBroker({"t": 1}) as broker, pytest.raises(InvalidArgument, match=message):
        call(broker)


def test_a_closed_broker_says_so() -> None:
    with KafkaBroker({"t": 1}) as broker:
        pass
    broker.close()
    for call in (lambda: broker.consume("t"), lambda: broker.produce("t", "a"), lambda: broker.stop_broker()):
        with pytest.raises(InvalidArgument, match="closed broker"):
            call()


def test_a_broker_does_not_travel() -> None:
    with KafkaBroker() as broker, pytest.raises(InvalidType, match=r"take broker.bootstrap_servers outside"):
        pickle.dumps(broker)


def test_a_script_with_a_broker_imports_no_models() -> None:
    script = (
        "import sys; from luminosity.testing import KafkaBroker; print('torch' in sys.modules, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"]
