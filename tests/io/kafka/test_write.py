from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import FixedWindows, IntervalWindow, TimestampedValue

from luminosity import KafkaRecord, UnwrittenRecord, WriteKafka
from luminosity.errors import InvalidArgument, InvalidType, KafkaError, may_pass
from luminosity.io.kafka import write
from luminosity.io.kafka.client import KafkaClient
from luminosity.io.kafka.outgoing import RecordParts
from luminosity.io.kafka.write import WriteDoFn
from luminosity.testing import KafkaBroker
from tests.io.kafka.steps import WriteStep, values


@pytest.fixture
def broker() -> Iterator[KafkaBroker]:
    with KafkaBroker({"t": 1, "many": 4}, brokers=2) as broker:
        yield broker


def test_a_pipeline_writes_and_tells_how_many(broker: KafkaBroker) -> None:
    elements = [(f"key-{n % 7}", str(n)) for n in range(100)]
    with beam.Pipeline(runner="luminosity.LuminosityRunner") as pipeline:
        words = pipeline | beam.Create(elements)
        written = words | WriteKafka(broker.bootstrap_servers, "many")
        total = written | beam.Map(lambda each: each[1]) | beam.CombineGlobally(sum)
        assert_that(total, equal_to([100]))
    records = broker.consume("many")
    assert sorted((record.key.decode(), record.value.decode()) for record in records) == sorted(elements)


def test_a_pipeline_writes_tables_on_another_runner(broker: KafkaBroker) -> None:
    table = pa.record_batch({"id": ["a", "b"], "n": [1, 2]})
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        written = pipeline | beam.Create([table]) | WriteKafka(broker.bootstrap_servers, "t", key="id")
        assert_that(written, equal_to([("t", 2)]))
    assert [(record.key, record.value) for record in broker.consume("t")] == [
        (b"a", b'{"id":"a","n":1}'),
        (b"b", b'{"id":"b","n":2}'),
    ]


def test_an_element_in_several_windows_is_written_once_and_counted_in_each(broker: KafkaBroker) -> None:
    first, second, third = (IntervalWindow(start, start + 20) for start in (0, 10, 20))
    with WriteStep(broker) as step:
        step.step.start_bundle()
        step.process("a", (first, second))
        step.process("b", (second, third))
        step.process("c", (first, second))
        found = {output.windows: output.value for output in step.step.finish_bundle()}
    assert found == {(first, second): ("t", 2), (second, third): ("t", 1)}
    assert values(broker) == [b"a", b"b", b"c"]


def test_one_window_alone_is_not_the_same_as_with_another(broker: KafkaBroker) -> None:
    first, second = (IntervalWindow(start, start + 20) for start in (0, 10))
    with WriteStep(broker) as step:
        step.step.start_bundle()
        for element, windows in (("a", (first,)), ("b", (first, second)), ("c", (first,)), ("d", (second,))):
            step.process(element, windows)
        found = {output.windows: output.value for output in step.step.finish_bundle()}
    assert found == {(first,): ("t", 2), (first, second): ("t", 1), (second,): ("t", 1)}


def test_windows_are_told_apart(broker: KafkaBroker) -> None:
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        written = (
            pipeline
            | beam.Create([1, 2, 12])
            | beam.Map(lambda n: TimestampedValue(str(n), n))
            | beam.WindowInto(FixedWindows(10))
            | WriteKafka(broker.bootstrap_servers, "t")
        )
        starts = written | beam.Map(lambda each, window=beam.DoFn.WindowParam: (int(window.start), each[1]))
        assert_that(starts, equal_to([(0, 2), (10, 1)]))


def test_records_of_odd_kinds_arrive_whole(broker: KafkaBroker) -> None:
    headers = (("a", b"1"), ("a", b"2"), ("b", None), ("c", b""))
    records = [
        KafkaRecord("x", 0, 0, 1_700_000_000_000, 1, b"k", b"v", headers),
        KafkaRecord("x", 0, 0, 0, 1, b"k", None),
        KafkaRecord("x", 0, 0, 1, 1, None, b""),
        KafkaRecord("x", 0, 0, 1, 1, b"", b"m" * 1_000_000),
    ]
    with WriteStep(broker) as step:
        step.bundle(*records, KafkaRecord("x", 0, 0, -1, 0, b"\xff", b"\x00"))
    found = broker.consume("t")
    assert [record[5:] for record in found[:4]] == [record[5:] for record in records]
    assert [record.timestamp for record in found[:4]] == [1_700_000_000_000, 1, 1, 1]
    assert found[4].timestamp > 1_700_000_000_000, "a record without a timestamp gets the time of writing"


def test_the_key_chooses_the_partition_unless_it_is_given(broker: KafkaBroker) -> None:
    with WriteStep(broker, topic="many", partition=lambda pair: 3 if pair[0] == "k-0" else None) as step:
        step.bundle(*((f"k-{n % 20}", str(n)) for n in range(100)))
    records = broker.consume("many")
    # The partitions that Java's clients choose: murmur2 of the key.
    assert {r.key.decode(): r.partition for r in records if r.key in (b"k-0", b"k-1", b"k-2")} == {
        "k-0": 3,
        **{key: _murmur2(key.encode()) % 4 for key in ("k-1", "k-2")},
    }
    for key in {record.key for record in records}:
        mine = [record for record in records if record.key == key]
        assert len({record.partition for record in mine}) == 1
        assert [int(record.value) for record in mine] == sorted(int(record.value) for record in mine)


def test_one_producer_serves_all_bundles(broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = KafkaClient.producer
    monkeypatch.setattr(KafkaClient, "producer", lambda *args: made.append(make(*args)) or made[-1])
    with WriteStep(broker) as step:
        for n in range(5):
            assert step.bundle(f"{n}", f"{n}!") == [("t", 2)]
            assert len(broker.consume("t")) == 2 * n + 2, "a bundle ends when Kafka has its records"
    assert len(made) == 1


class _Watched:
    """A producer, and the requests for metadata that it was asked for."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self.asked: list[str] = []

    def list_topics(self, topic: str, *, timeout: float) -> Any:
        self.asked.append(topic)
        return self._producer.list_topics(topic, timeout=timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def __len__(self) -> int:
        return len(self._producer)


@pytest.mark.parametrize(("config", "asked"), [({}, ["t", "t"]), ({"enable.idempotence": False}, [])])
def test_the_first_delivery_asks_for_the_producers_number(
    broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], asked: list[str]
) -> None:
    made: list[_Watched] = []
    make = KafkaClient.producer
    monkeypatch.setattr(KafkaClient, "producer", lambda *args: made.append(_Watched(make(*args))) or made[-1])
    with WriteStep(broker, config=config) as step:
        assert step.bundle("a", "b") == [("t", 2)]
        assert made[0].asked == asked
        step.bundle("c")
        assert made[0].asked == asked, "it has a number"
        step.step._producer.abandon()
        step.bundle("d")
    assert [each.asked for each in made] == [asked, asked], "each producer has its own"
    assert values(broker) == [b"a", b"b", b"c", b"d"]


def test_an_empty_bundle_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KafkaClient, "producer", lambda *_: pytest.fail("it connects"))
    step = WriteDoFn(KafkaClient("nowhere:1"), RecordParts("t"), 1, False)
    step.setup()
    step.start_bundle()
    assert list(step.finish_bundle()) == []
    step.teardown()


def test_a_refused_record_fails_the_bundle_with_its_coordinates(broker: KafkaBroker) -> None:
    with WriteStep(broker) as step:
        broker.fail_requests("produce", "INVALID_RECORD")
        with pytest.raises(
            KafkaError, match=r"t\[0\], key b'k', 2 bytes: .*INVALID_RECORD.*with_exception_handling"
        ) as caught:
            step.bundle(("k", "v"))
        assert not may_pass(caught.value)
        assert step.bundle("next") == [("t", 1)], "a producer that failed is replaced"
    assert values(broker) == [b"next"]


def test_a_record_too_large_is_refused_before_it_is_sent(broker: KafkaBroker) -> None:
    with WriteStep(broker) as step, pytest.raises(KafkaError, match=r"t, no key, 1100000 bytes: .*MSG_SIZE_TOO_LARGE"):
        step.bundle(b"x" * 1_100_000)


def test_a_broker_that_stays_away_fails_the_bundle_for_another_attempt(broker: KafkaBroker) -> None:
    broker.stop_broker()
    with WriteStep(broker, timeout_s=0.2, letters=True) as step:
        with pytest.raises(KafkaError, match=r"t.*, key b'k', 2 bytes: .*_MSG_TIMED_OUT") as caught:
            step.bundle(("k", "v"))
        assert may_pass(caught.value)
    broker.start_broker()
    with WriteStep(broker) as step:
        assert step.bundle("after") == [("t", 1)]
    assert values(broker) == [b"after"]


def test_a_bundle_that_failed_elsewhere_leaves_nothing_in_the_queue(broker: KafkaBroker) -> None:
    with WriteStep(broker, config={"linger.ms": 30_000}) as step:
        step.bundle("first")  # flush does not wait for linger.ms
        step.step.start_bundle()
        step.process("of a bundle that fails in another step")
        assert step.bundle("second") == [("t", 1)]
    assert values(broker) == [b"first", b"second"]


def test_a_full_queue_makes_the_step_wait(broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    send = write.BundleProducer.send

    def watched(self: Any, *args: Any) -> None:
        nonlocal longest
        send(self, *args)
        longest = max(longest, len(self._producer))

    monkeypatch.setattr(write.BundleProducer, "send", watched)
    broker.set_delay(0.02)  # a slow broker
    with WriteStep(broker, config={"queue.buffering.max.messages": 20}) as step:
        assert step.bundle(*map(str, range(200))) == [("t", 200)]
    assert longest <= 20
    assert values(broker) == [b"%d" % n for n in range(200)]


def test_dead_letters_have_coordinates(broker: KafkaBroker) -> None:
    with WriteStep(broker, letters=True, topic=None, value=None) as step:
        found = step.bundle(
            {"topic": "t", "key": "k", "value": "good"},
            {"topic": "t", "key": "large", "value": b"x" * 2_000_000},
            {"topic": "t", "value": "nowhere", "partition": 9},
            {"value": "no topic"},
            3.14,
        )
    assert found[0] == ("t", 1)
    letters: list[UnwrittenRecord] = found[1:]
    assert {(letter.topic, letter.partition, letter.key) for letter in letters} == {
        ("t", None, b"large"),
        ("t", 9, None),
        (None, None, None),
    }
    reasons = {str(letter.element)[:30]: letter.reason for letter in letters}
    assert reasons["3.14"].startswith("InvalidType: found an element of type float")
    assert any("MSG_SIZE_TOO_LARGE" in reason for reason in reasons.values())
    assert any("_UNKNOWN_PARTITION" in reason for reason in reasons.values())
    assert values(broker) == [b"good"]


def test_a_row_is_a_dead_letter_alone(broker: KafkaBroker) -> None:
    table = pa.record_batch({"n": [1, 2, 3]})
    with WriteStep(broker, letters=True, value=lambda row: str(6 // (row["n"] - 2))) as step:
        found = step.bundle(table)
    assert found[0] == ("t", 2)
    assert found[1] == UnwrittenRecord(table.slice(1, 1), "ZeroDivisionError: integer division or modulo by zero")
    assert values(broker) == [b"-6", b"6"]


@pytest.mark.parametrize(("times", "refused"), [(1, []), (2, [b"0"])])
def test_the_innocents_of_a_refused_request_are_written(broker: KafkaBroker, times: int, refused: list[bytes]) -> None:
    """The broker refuses all records of a request. Alone, only the one at fault is refused again."""
    broker.fail_requests("produce", *["INVALID_RECORD"] * times)
    with WriteStep(broker, letters=True, config={"linger.ms": 1_000}) as step:
        found = step.bundle(*(("k", str(n)) for n in range(10)))
    assert found[0] == ("t", 10 - len(refused))
    assert [letter.element[1].encode() for letter in found[1:]] == refused
    assert [(letter.topic, letter.partition, letter.key) for letter in found[1:]] == [("t", 0, b"k")] * len(refused)
    assert values(broker) == [b"%d" % n for n in range(len(refused), 10)]


def test_records_behind_a_refused_request_are_sent_again_to_keep_the_order(broker: KafkaBroker) -> None:
    broker.fail_requests("produce", "INVALID_RECORD")
    with WriteStep(
        broker, letters=True, config={"batch.num.messages": 5, "linger.ms": 1_000, "max.in.flight": 1}
    ) as step:
        assert step.bundle(*(("k", str(n)) for n in range(10))) == [("t", 10)]
    found = [int(value or b"") for value in values(broker)]
    assert set(found) == set(range(10))
    assert found[-10:] == list(range(10)), "the last copies are in order"


def test_dead_letters_do_not_need_the_memory_of_the_whole_bundle(
    broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "_MOST_KEPT", 10)
    with WriteStep(broker, letters=True) as step:
        step.step.start_bundle()
        for n in range(100):
            step.process(str(n))
            assert len(step.step._kept) < 10
        assert step.finish() == [("t", 100)]
    assert values(broker) == [b"%d" % n for n in range(100)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"topic": ""}, InvalidArgument, "found topic=''"),
        ({"key": 3}, InvalidType, "found key= of type int, expected a function or a name"),
        ({"delivery_timeout_s": 0}, InvalidArgument, "found delivery_timeout_s=0"),
        ({"config": {"transactional.id": "x"}}, InvalidArgument, "'transactional.id' in config=.*use exactly_once="),
        ({"config": {"message.timeout.ms": 1}}, InvalidArgument, "use delivery_timeout_s="),
        ({"config": {"sasl.password": "hush"}}, InvalidArgument, "pass secrets="),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        WriteKafka("broker:9092", **{"topic": "t", **arguments})


def test_a_setting_that_the_client_does_not_know_is_named(broker: KafkaBroker) -> None:
    with WriteStep(broker, config={"lingr.ms": 5}) as step, pytest.raises(KafkaError, match=r"lingr\.ms"):
        step.bundle("a")


def _murmur2(data: bytes) -> int:
    """The hash of Java's clients, with the sign bit cleared."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(data)
    for at in range(0, len(data) - len(data) % 4, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    tail = data[len(data) - len(data) % 4 :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return (h ^ h >> 15) & 0x7FFFFFFF
