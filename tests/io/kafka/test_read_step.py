"""The step that reads groups: every record once and in order, whatever stops or fails on the way."""

from __future__ import annotations

import logging
import random
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from apache_beam import coders
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp

from luminosity.errors import KafkaError
from luminosity.io.kafka import read_step
from luminosity.io.kafka.client import KafkaClient
from luminosity.io.kafka.consumer import ConsumerSettings
from luminosity.io.kafka.emit import Outputs
from luminosity.io.kafka.progress import PartitionGroup, Span
from luminosity.io.kafka.read_step import check_brokers
from luminosity.testing import ScriptedKafka
from luminosity.testing.scripted_consumer import ScriptedConsumer
from tests.io.kafka.scripted import FIRST_MS, Bundle, Log, script, step_of
from tests.streams import wait_for

_T0, _T1 = ("t", 0), ("t", 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles without records end at once, and look at idle partitions each time."""
    monkeypatch.setattr(read_step, "_IDLE_BUNDLE_S", 0.0)
    monkeypatch.setattr(read_step, "_POLL_S", 0.001)
    monkeypatch.setattr(read_step, "_CHECK_EVERY_S", 0.0)


def read_all(step: Any, group: PartitionGroup, most: int = 1000, **more: Any) -> list[Any]:
    """Run bundles until nothing is left; return the offsets of each."""
    found: list[Any] = []
    state = None
    for _ in range(most):
        bundle = Bundle(step, group, state, **more)
        found.append(bundle.offsets)
        if bundle.rest is None:
            return found
        group, state = bundle.rest, bundle.state
    raise AssertionError(f"{group} is not done after {most} bundles")


def read_until(step: Any, bundle: Bundle, count: int, most: int = 1000) -> list[Any]:
    """Run bundles of a stream until they have so many records; return the offsets of each."""
    found: list[Any] = []
    for _ in range(most):
        bundle = Bundle(step, bundle.rest, bundle.state)
        found.append(bundle.offsets)
        if len(flat(found)) >= count:
            return found
    raise AssertionError(f"found {found} after {most} bundles")


def flat(bundles: list[Any]) -> list[Any]:
    return [offset for bundle in bundles for offset in bundle]


def test_a_bounded_read_ends_with_its_last_record(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log(range(5)), _T1: Log(range(3))})
    step = step_of(kafka, stop="now")
    group = step.initial_restriction(0)
    script(kafka, {_T0: Log(range(5, 50))})  # later records are not read
    parts = list(step.split(0, group))
    assert [list(part.spans) for part in parts] == [[_T0], [_T1]]
    assert [flat(read_all(step, part)) for part in parts] == [
        [("t", 0, offset) for offset in range(5)],
        [("t", 1, offset) for offset in range(3)],
    ]


def test_records_of_a_poll_are_one_output_with_a_time_each(kafka: ScriptedKafka) -> None:
    step = step_of(script(kafka, {_T0: Log(range(40)), _T1: Log(range(30))}))
    bundle = Bundle(step, step.initial_restriction(0))
    assert (bundle.emitted, len(bundle.outputs)) == (1, 70)
    assert all(each.timestamp.micros == 1000 * each.value.timestamp for each in bundle.outputs)


def test_outputs_survive_their_coder(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log([0], value="1"), _T1: Log([0], value="{")})
    step = step_of(kafka, value="json", keeps_unreadable=True)
    good, bad = Bundle(step, step.initial_restriction(0)).outputs
    coder = coders.registry.get_coder(Outputs)
    again = coder.decode(coder.encode(Outputs([good, bad])))
    assert (again[0], again[1].tag, again[1].value) == (good, "unreadable", bad.value)
    assert coder.estimate_size(again) > coder.estimate_size(Outputs([good]))


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (Log([0, 1, 5, 9]), [0, 1, 5, 9]),  # compacted
        (Log([0, 1], end=4), [0, 1]),  # markers of transactions at the end
        (Log([], end=7), []),  # nothing but markers
        (Log([3, 4], first=3), [3, 4]),
    ],
)
def test_gaps_in_offsets_end_as_well(kafka: ScriptedKafka, log: Log, expected: list[int]) -> None:
    step = step_of(script(kafka, {_T0: log}), stop="now")
    (part,) = step.split(0, step.initial_restriction(0))
    assert part.spans[_T0].stop == max(log.end, *(offset + 1 for offset in (0, *expected)))
    assert flat(read_all(step, part)) == [("t", 0, offset) for offset in expected]


def test_an_offset_to_stop_at_inside_a_gap_ends(kafka: ScriptedKafka) -> None:
    step = step_of(script(kafka, {_T0: Log([0, 1, 8])}), stop={0: 5})
    (part,) = step.split(0, step.initial_restriction(0))
    assert flat(read_all(step, part)) == [("t", 0, 0), ("t", 0, 1)]


def test_empty_topics_have_nothing_to_read(kafka: ScriptedKafka) -> None:
    step = step_of(script(kafka, {_T0: Log(), _T1: Log(first=4)}), stop="now")
    assert list(step.split(0, step.initial_restriction(0))) == []


def test_an_end_in_the_future_is_waited_for(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log(range(2))})
    step = step_of(kafka, stop={0: 4})
    (part,) = step.split(0, step.initial_restriction(0))
    first = Bundle(step, part)
    assert first.offsets == [("t", 0, 0), ("t", 0, 1)]
    script(kafka, {_T0: Log(range(2, 4))})
    second = Bundle(step, first.rest, first.state)
    assert second.offsets == [("t", 0, 2), ("t", 0, 3)]
    assert second.rest is None


def test_a_request_to_split_ends_the_bundle_after_its_claim(
    kafka: ScriptedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(kafka, {_T0: Log(range(1000))})
    step = step_of(kafka)
    group = step.initial_restriction(0)
    step.setup()
    bundle = Bundle(step, group, meanwhile=lambda bundle: bundle.tracker.try_split(0.0))
    assert 0 < len(bundle.outputs) < 1000
    rest = Bundle(step, bundle.rest, bundle.state)
    assert [*bundle.offsets, *rest.offsets] == [("t", 0, offset) for offset in range(1000)]
    assert kafka.requests["open"] == 2  # one that looked for the partitions, one that reads
    assert kafka.requests["assign"] == 1, "the second bundle goes on where the first has stopped"
    step.teardown()
    assert wait_for(lambda: kafka.open_consumers == 0)


def test_a_bundle_has_an_end_on_runners_that_do_not_ask(kafka: ScriptedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_step, "_RECORDS_PER_BUNDLE", 150)
    step = step_of(script(kafka, {_T0: Log(range(1000))}), stop="now")
    (part,) = step.split(0, step.initial_restriction(0))
    bundles = read_all(step, part)
    assert flat(bundles) == [("t", 0, offset) for offset in range(1000)]
    assert len(bundles) > 2
    assert max(map(len, bundles)) < 600


@pytest.mark.parametrize("seed", range(30))
def test_random_stops_and_failures_lose_and_double_nothing(kafka: ScriptedKafka, seed: int) -> None:
    """Bundles are asked to stop, fail and are repeated, or go on with another consumer, at random."""
    chance = random.Random(seed)
    logs = {
        ("t", number): Log(sorted(chance.sample(range(60), chance.randrange(1, 40))), end=chance.choice([60, 75]))
        for number in range(3)
    }
    expected = {partition: list(log.offsets) for partition, log in logs.items()}
    script(kafka, logs)
    steps = [step_of(kafka), step_of(kafka)]
    for step in steps:
        step.setup()
    group, state = steps[0].initial_restriction(0), None
    committed: dict[Any, list[int]] = {partition: [] for partition in logs}

    def meanwhile(bundle: Bundle) -> None:
        if chance.random() < 0.05:
            bundle.tracker.try_split(chance.choice([0.0, 0.5]))
        if chance.random() < 0.02:
            raise RuntimeError("a step failed")

    for _ in range(500):
        for consumer in read_step._POOL._idle.values():
            consumer.chunk = chance.choice([1, 3, 10])
        try:
            bundle = Bundle(chance.choice(steps), group, state, meanwhile=meanwhile)
        except RuntimeError:
            continue  # the runner repeats the bundle
        for topic, number, offset in bundle.offsets:
            committed[topic, number].append(offset)
        group, state = bundle.rest, bundle.state
        if all(span.start >= logs[partition].end for partition, span in group.spans.items()):
            break
    assert committed == expected
    for step in steps:
        step.teardown()
    assert wait_for(lambda: kafka.open_consumers == 0)


@pytest.mark.parametrize("where", ["consume", "chunk"])
def test_records_of_a_poll_that_fails_come_again(
    kafka: ScriptedKafka, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The consumer is behind them, and nothing has claimed them: the repeated bundle must not go on from there."""
    step = step_of(script(kafka, {_T0: Log(range(20))}), stop="now")
    step.setup()
    (group,) = step.split(0, step.initial_restriction(0))
    owner, name = (ScriptedConsumer, "consume") if where == "consume" else (read_step.Chunk, "__init__")
    original = getattr(owner, name)

    def fail(self: Any, first: Any, *more: Any) -> Any:
        found = original(self, first, *more)
        if (found or where == "chunk") and first != 1:  # a poll of one message is the beginning of a larger one
            raise OSError("out of memory")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="out of memory"):
            Bundle(step, group)
    assert flat(read_all(step, group)) == [("t", 0, offset) for offset in range(20)]
    step.teardown()


def test_new_partitions_and_topics_are_found_once(kafka: ScriptedKafka) -> None:
    script(kafka, {("reviews-a", 0): Log(range(2)), ("other", 0): Log(range(9))})
    steps = [step_of(kafka, pattern=r"reviews-.*", groups=2, look_every_s=1e-9) for _ in range(2)]
    groups = [step.initial_restriction(number) for number, step in enumerate(steps)]
    found: list[Any] = []

    def read() -> None:
        for number, step in enumerate(steps):
            bundle = Bundle(step, groups[number], element=number)
            found.extend(bundle.offsets)
            groups[number] = bundle.rest

    read()
    script(kafka, {("reviews-a", 1): Log(range(1, 3), first=1)})
    script(kafka, {("reviews-b", 0): Log([0])})
    script(kafka, {("__reviews-c", 0): Log([0])})
    for _ in range(3):
        read()
    assert sorted(found) == [
        *(("reviews-a", 0, offset) for offset in (0, 1)),
        *(("reviews-a", 1, offset) for offset in (1, 2)),
        ("reviews-b", 0, 0),
    ]


def test_start_positions(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log(range(10), first=2), _T1: Log(range(4))})
    kafka.commit("g", {_T0: 5})
    at_six = Timestamp(micros=1000 * (FIRST_MS + 6))
    for start, expected in (
        ("earliest", {_T0: 2, _T1: 0}),
        ("latest", {_T0: 10, _T1: 4}),
        ("committed", {_T0: 5, _T1: 0}),
        (at_six, {_T0: 6, _T1: 4}),
        (datetime.fromtimestamp((FIRST_MS + 3) / 1000, timezone.utc), {_T0: 3, _T1: 3}),
        (datetime(2000, 1, 1, tzinfo=timezone.utc), {_T0: 2, _T1: 0}),
        ({0: 7, 1: 1}, {_T0: 7, _T1: 1}),
    ):
        group = step_of(kafka, start=start, group_id="g").initial_restriction(0)
        assert {partition: span.start for partition, span in group.spans.items()} == expected


def test_stop_positions(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log(range(10)), _T1: Log(range(4))})
    for stop, expected in (
        ("now", {_T0: 10, _T1: 4}),
        (Timestamp(micros=1000 * (FIRST_MS + 6)), {_T0: 6, _T1: 4}),
        ({0: 7, 1: 0}, {_T0: 7, _T1: 0}),
    ):
        group = step_of(kafka, stop=stop).initial_restriction(0)
        assert {partition: span.stop for partition, span in group.spans.items()} == expected
        assert not group.is_open
    group = step_of(kafka, start="latest", stop={0: 3, 1: 3}).initial_restriction(0)
    assert group.is_done


def test_a_time_in_the_future_stops_when_it_has_come(kafka: ScriptedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    script(kafka, {_T0: Log(range(3))})
    stop = datetime.now(timezone.utc) + timedelta(hours=1)
    step = step_of(kafka, stop=stop)
    group = step.initial_restriction(0)
    assert group.is_open
    first = Bundle(step, group)
    assert len(first.outputs) == 3
    at_four = stop.timestamp() * 1000
    for n, at in ((3, at_four - 60_000), (4, at_four), (5, at_four - 60_000)):
        kafka.produce("t", f"v{n}", timestamp=round(at))
    later = time.time() + 7200
    monkeypatch.setattr(read_step.time, "time", lambda: later)
    second = Bundle(step, first.rest, first.state)
    assert second.offsets == [("t", 0, 3)]
    assert second.rest is None


@pytest.mark.parametrize("name", ["start", "stop"])
def test_offsets_must_name_every_partition_and_no_other(kafka: ScriptedKafka, name: str) -> None:
    script(kafka, {_T0: Log(range(10)), _T1: Log(range(4))})
    with pytest.raises(KafkaError, match=rf"found no offset for t\[1\] in {name}="):
        step_of(kafka, **{name: {0: 1}}).initial_restriction(0)
    with pytest.raises(KafkaError, match=rf"found an offset for t\[7\] in {name}=, which does not exist"):
        step_of(kafka, **{name: {0: 1, 1: 1, 7: 1}}).initial_restriction(0)


def test_an_unknown_topic_is_named(kafka: ScriptedKafka) -> None:
    script(kafka, {("reviews", 0): Log()})
    with pytest.raises(KafkaError, match="found no topic 'revews' at scripted:9092; did you mean 'reviews'"):
        step_of(kafka, ["revews"]).initial_restriction(0)
    assert step_of(kafka, pattern="none.*").initial_restriction(0)[:2] == ({}, True)


def test_retention_that_has_overtaken_is_an_error_with_the_numbers(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log(range(50, 60), first=50)})
    step = step_of(kafka, start={0: 20})
    with pytest.raises(KafkaError, match=r"t\[0\] begins at offset 50, but offset 20 .*: 30 offsets were removed"):
        Bundle(step, step.initial_restriction(0))


def test_retention_that_has_overtaken_is_skipped_if_told(
    kafka: ScriptedKafka, caplog: pytest.LogCaptureFixture
) -> None:
    script(kafka, {_T0: Log(range(50, 60), first=50)})
    step = step_of(kafka, start={0: 20}, stop={0: 55}, skips_lost=True)
    with caplog.at_level(logging.WARNING, "luminosity"):
        assert flat(read_all(step, step.initial_restriction(0))) == [("t", 0, offset) for offset in range(50, 55)]
    assert "30 offsets were removed" in caplog.text
    step = step_of(kafka, start={0: 20}, stop={0: 30}, skips_lost=True)
    assert flat(read_all(step, step.initial_restriction(0))) == []


@pytest.mark.parametrize("stop", [None, "now", {0: 30}])
def test_an_offset_behind_the_end_is_an_error(kafka: ScriptedKafka, stop: Any) -> None:
    step = step_of(script(kafka, {_T0: Log(range(5))}), start={0: 20}, stop=stop, skips_lost=True)
    with pytest.raises(KafkaError, match=r"t\[0\] ends at offset 5, but offset 20 was to be read"):
        step.initial_restriction(0)
    assert step_of(kafka, start={0: 5}, stop=stop).initial_restriction(0).spans[_T0].start == 5, "the end itself"


def test_a_group_that_has_read_behind_the_end_is_warned_about(
    kafka: ScriptedKafka, caplog: pytest.LogCaptureFixture
) -> None:
    """The topic may be new, or the group has read an open transaction."""
    script(kafka, {_T0: Log(range(5))}).commit("g", {_T0: 9})
    step = step_of(kafka, start="committed", stop="now", group_id="g")
    with caplog.at_level(logging.WARNING, "luminosity"):
        assert step.initial_restriction(0).is_done
    assert "t[0] ends at offset 5, but offset 9 was to be read" in caplog.text
    stream = step_of(kafka, start="committed", group_id="g")
    with pytest.raises(KafkaError, match=r"t\[0\] ends at offset 5, but offset 9 was to be read"):
        Bundle(stream, stream.initial_restriction(0))


def test_a_topic_that_was_created_anew_is_an_error(kafka: ScriptedKafka) -> None:
    step = step_of(script(kafka, {_T0: Log(range(20))}), start={0: 15})
    group = step.initial_restriction(0)
    kafka.delete_topic("t")
    script(kafka, {_T0: Log(range(5))})
    with pytest.raises(KafkaError, match=r"t\[0\] ends at offset 5, but offset 15 was to be read"):
        Bundle(step, group)


def test_a_partition_that_fails_for_a_while_is_read_again(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log(range(5))})
    step = step_of(kafka, stop="now")
    kafka.fail_reads("t", 0, "UNKNOWN", "REQUEST_TIMED_OUT", "UNKNOWN", at=2)
    assert flat(read_all(step, step.initial_restriction(0))) == [("t", 0, offset) for offset in range(5)]


def test_a_partition_that_may_not_be_read_is_an_error(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log(range(5))})
    kafka.fail_reads("t", 0, "TOPIC_AUTHORIZATION_FAILED", at=5)
    step = step_of(kafka)
    with pytest.raises(KafkaError, match=r"t\[0\] can't be read from offset 5 on: .*TOPIC_AUTHORIZATION_FAILED"):
        Bundle(step, step.initial_restriction(0))


def test_a_partition_that_fails_now_and_then_has_not_failed_all_the_time(kafka: ScriptedKafka) -> None:
    """It has no records between its failures, but its end is reached."""
    script(kafka, {_T0: Log(range(2))})
    step = step_of(kafka, max_outage_s=0.02)
    step.setup()
    bundle = Bundle(step, step.initial_restriction(0))
    for _ in range(3):
        time.sleep(0.03)
        kafka.fail_reads("t", 0, "NOT_LEADER_FOR_PARTITION")
        before = kafka.requests["assign"]
        while kafka.requests["assign"] < before + 1:  # It has failed, and is assigned again.
            bundle = Bundle(step, bundle.rest, bundle.state)
        bundle = Bundle(step, bundle.rest, bundle.state)
    kafka.produce("t", b"2")
    while not bundle.offsets:  # It reads on.
        bundle = Bundle(step, bundle.rest, bundle.state)
    assert bundle.offsets == [("t", 0, 2)]
    step.teardown()


def test_a_partition_that_always_fails_is_an_error_although_others_have_records(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log(range(2)), _T1: Log(range(1000))})
    kafka.fail_reads("t", 0, *["UNKNOWN"] * 1000)
    step = step_of(kafka, max_outage_s=0.01)
    step.setup()
    group = step.initial_restriction(0)
    with pytest.raises(KafkaError, match=r"t\[0\] can't be read from offset 0 on: .*UNKNOWN"):
        read_all(step, group)
    step.teardown()


def test_a_topic_that_is_deleted_is_an_error_with_its_name(
    kafka: ScriptedKafka, caplog: pytest.LogCaptureFixture
) -> None:
    script(kafka, {_T0: Log(range(2)), ("other", 0): Log(range(3))})
    for pattern in ("t|other", "t"):  # Brokers answer in another way if all partitions are missing.
        step = step_of(kafka, pattern=pattern, max_outage_s=0.05)
        step.setup()
        bundle = Bundle(step, step.initial_restriction(0))
        assert len(bundle.offsets) == (5 if "other" in pattern else 2)
        kafka.delete_topic("t")
        with pytest.raises(KafkaError, match=r"t\[0\] (has not existed at scripted:9092|can't be read from offset 2)"):
            read_until(step, bundle, 1)
        step.teardown()
        script(kafka, {_T0: Log(range(2))})
    assert "t[0]: not found at scripted:9092 any more; reading waits" in caplog.text


def test_retention_that_overtakes_a_reader_is_noticed_in_the_middle(kafka: ScriptedKafka) -> None:
    for skips in (True, False):
        kafka.create_topic(f"t{skips}", 1)
        kafka.produce_many(f"t{skips}", [str(n) for n in range(5)])
        step = step_of(kafka, [f"t{skips}"], skips_lost=skips)
        bundle = Bundle(step, step.initial_restriction(0))
        assert len(bundle.offsets) == 5
        kafka.produce_many(f"t{skips}", [str(n) for n in range(5, 20)])
        kafka.delete_records(f"t{skips}", 0, 12)
        if not skips:
            with pytest.raises(KafkaError, match=r"begins at offset 12, but offset 5 .*: 7 offsets were removed by"):
                Bundle(step, bundle.rest, bundle.state)
            return
        assert [offset for _, _, offset in flat(read_until(step, bundle, 8))] == list(range(12, 20))


def test_partitions_that_come_while_a_read_has_an_end_are_not_read(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log(range(3))})
    step = step_of(kafka, stop="now", look_every_s=1e-9)
    parts = list(step.split(0, step.initial_restriction(0)))
    script(kafka, {_T0: Log(range(3, 6)), _T1: Log(range(5))})
    assert [flat(read_all(step, part)) for part in parts] == [[("t", 0, offset) for offset in range(3)]]


def test_a_pattern_may_match_nothing_yet(kafka: ScriptedKafka) -> None:
    bounded = step_of(kafka, pattern="t.*", stop="now")
    assert list(bounded.split(0, bounded.initial_restriction(0))) == []
    step = step_of(kafka, pattern="t.*", look_every_s=1e-9)
    bundle = Bundle(step, step.initial_restriction(0))
    assert bundle.offsets == []
    script(kafka, {_T0: Log(range(3))})
    assert flat(read_until(step, bundle, 3)) == [("t", 0, offset) for offset in range(3)]


def test_brokers_may_be_away_for_a_while_but_not_for_ever(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log(range(5))})
    step = step_of(kafka)
    group = step.initial_restriction(0)
    step.setup()
    kafka.stop_broker()
    bundle = Bundle(step, group)
    assert bundle.outputs == []
    assert bundle.watermark == MIN_TIMESTAMP
    kafka.start_broker()
    assert len(Bundle(step, bundle.rest, bundle.state).outputs) == 5
    step.teardown()
    kafka.stop_broker()
    impatient = step_of(kafka, max_outage_s=1e-9)
    with pytest.raises(KafkaError, match=r"brokers at scripted:9092 have not answered for 0 s: .*transport failure"):
        impatient.initial_restriction(0)


def test_watermarks_follow_records_and_idle_partitions(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log(range(3)), _T1: Log([])})
    step = step_of(kafka, delay_s=2)
    before = time.time()
    bundle = Bundle(step, step.initial_restriction(0))
    after = time.time()
    assert Timestamp(before - 2.001) <= bundle.watermark <= Timestamp(after - 2), "everything is read"
    script(kafka, {_T0: Log(range(3, 10_000))})  # and nothing of it is read yet
    kafka.stop_broker()
    again = Bundle(step, bundle.rest, bundle.state)
    assert again.watermark == bundle.watermark, "it never moves back"


def test_a_partition_with_unread_records_holds_the_watermark(
    kafka: ScriptedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_step, "_RECORDS_PER_BUNDLE", 1)
    script(kafka, {_T0: Log(range(300)), _T1: Log([])})
    step = step_of(kafka, delay_s=1)
    bundle = Bundle(step, step.initial_restriction(0))
    newest = max(output.value.offset for output in bundle.outputs)
    assert bundle.rest.spans[_T0].start < 300
    assert bundle.watermark == Timestamp(micros=(1_700_000_000_000 + newest) * 1000 - 1_000_000)


@pytest.mark.parametrize("commit", [True, False])
def test_an_open_transaction_holds_the_watermark(kafka: ScriptedKafka, commit: bool) -> None:
    """Its records come when it is committed, with the times at which they were written."""
    kafka.create_topic("t")
    old = (time.time() - 3600) * 1000
    kafka.produce("t", "before", timestamp=round(old))
    kafka.produce("t", "in it", timestamp=round(old) + 1000, transaction="long")
    step = step_of(kafka)
    step.setup()
    bundle = Bundle(step, step.initial_restriction(0))
    for _ in range(3):
        bundle = Bundle(step, bundle.rest, bundle.state)
        assert bundle.offsets == []
        assert bundle.watermark == Timestamp(micros=round(old) * 1000), "that of the last record"
    kafka.end_transaction("long", commit=commit)
    found: list[Any] = []
    for _ in range(5):
        bundle = Bundle(step, bundle.rest, bundle.state)
        found += bundle.offsets
    assert found == ([("t", 0, 1)] if commit else [])
    assert bundle.watermark > Timestamp(micros=round(old + 60_000) * 1000), "it follows the clock again"
    step.teardown()


def test_a_group_without_partitions_does_not_hold_the_watermark(kafka: ScriptedKafka) -> None:
    step = step_of(script(kafka, {("x", 0): Log()}), pattern="none.*", delay_s=0)
    before = time.time()
    bundle = Bundle(step, step.initial_restriction(0))
    assert bundle.watermark >= Timestamp(before - 0.001)


def test_offsets_are_committed_for_the_group_when_the_bundle_is(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log(range(5)), _T1: Log([], end=2)})
    step = step_of(kafka, group_id="g", stop="now")
    step.setup()
    group = step.initial_restriction(0)
    bundle = Bundle(step, group)
    assert bundle.rest is None
    assert kafka.committed("g") == {}, "the bundle is not committed yet"
    for callback in bundle.callbacks:
        callback()
    assert kafka.committed("g") == {_T0: 5, _T1: 2}
    step.teardown()
    for callback in bundle.callbacks:
        callback()  # late: the consumer is closed
    assert Bundle(step_of(kafka, stop="now"), group).callbacks == [], "there is no group"


def test_settings_of_the_consumer() -> None:
    client = KafkaClient("one:9092", {"fetch.wait.max.ms": 7})
    settings = ConsumerSettings(client, "g", "read_uncommitted", 1.0, "name").settings()
    assert settings["group.id"] == "g"
    assert settings["isolation.level"] == "read_uncommitted"
    assert settings["enable.auto.commit"] is False
    assert settings["auto.offset.reset"] == "error"
    assert "fetch.wait.max.ms" not in settings, "the user's own"
    assert ConsumerSettings(client, None, "read_committed", 1.0, "name").settings()["group.id"] == "name"


def test_the_backlog_is_the_size(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log(range(10)), _T1: Log(range(4))})
    step = step_of(kafka)
    group = step.initial_restriction(0)
    assert step.restriction_size(0, group) == 14
    script(kafka, {_T1: Log(range(4, 9))})
    bundle = Bundle(step, group)
    assert step.restriction_size(0, bundle.rest) == 0
    assert step.restriction_size(0, PartitionGroup({_T0: Span(4, 6, 100)})) == 2


def test_brokers_that_refuse_are_told_before_the_run(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log()})
    kafka.refuse_clients()
    with pytest.raises(KafkaError, match=r"refuse this client: .*\(_AUTHENTICATION\); check the settings security"):
        check_brokers(step_of(kafka)._settings, 100)
    assert wait_for(lambda: kafka.open_consumers == 0)


def test_a_missing_topic_is_told_before_the_run(kafka: ScriptedKafka) -> None:
    with pytest.raises(KafkaError, match="found no topic 't' at"):
        check_brokers(step_of(script(kafka, {("x", 0): Log()}))._settings, 100)


def test_brokers_that_are_away_before_the_run_are_named(kafka: ScriptedKafka) -> None:
    script(kafka, {_T0: Log()})
    kafka.stop_broker()
    words = r"brokers at scripted:9092 have not answered for 0 s: .*; check the addresses, and that the brokers run"
    with pytest.raises(KafkaError, match=words):
        check_brokers(step_of(kafka)._settings, 1e-9)
    assert wait_for(lambda: kafka.open_consumers == 0)


def test_a_client_that_was_accepted_may_be_refused_for_a_while(kafka: ScriptedKafka) -> None:
    """A token that has just expired must not end a stream that has run for months."""
    script(kafka, {_T0: Log(range(5))})
    step = step_of(kafka)
    group = step.initial_restriction(0)
    step.setup()
    first = Bundle(step, group)
    kafka.refuse_clients()
    second = Bundle(step, first.rest, first.state)
    kafka.start_broker()
    script(kafka, {_T0: Log(range(5, 7))})
    third = Bundle(step, second.rest, second.state)
    assert [len(bundle.outputs) for bundle in (first, second, third)] == [5, 0, 2]
    step.teardown()
