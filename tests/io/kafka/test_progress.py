"""Groups of partitions: what is claimed and what is left, the event times of records, and the watermarks."""

from __future__ import annotations

import pickle
from datetime import datetime, timezone
from typing import Any

import pytest
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp

from luminosity import KafkaRecord
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.io.kafka.emit import Emitter, Tally
from luminosity.io.kafka.progress import (
    LAST,
    Claim,
    GroupTracker,
    GroupWatermark,
    GroupWatermarks,
    PartitionGroup,
    Span,
    TimestampPolicy,
)

_A, _B = ("t", 0), ("t", 1)


def test_a_runner_that_splits_is_refused_and_the_next_claim_fails() -> None:
    """Whatever it took away could run before the bundle is committed, and break the order of a partition."""
    tracker = GroupTracker(PartitionGroup({_A: Span(0, 10)}))
    assert tracker.try_claim(Claim({_A: 3}))
    assert tracker.try_split(0.0) is None
    assert not tracker.try_claim(Claim({_A: 4}))
    assert not tracker.try_claim(Claim(ends={_A: 30}))  # the end is noted: the rest has it as its backlog
    assert tracker.try_claim(LAST)
    claimed, rest = tracker.try_split(0.0)
    assert claimed.spans == {_A: Span(0, 3, 3)}
    assert rest.spans == {_A: Span(3, 10, 30)}
    assert tracker.check_done()
    assert not tracker.try_claim(Claim({_A: 5}))
    assert tracker.try_split(0.0) is None


def test_a_group_that_is_done_has_no_rest() -> None:
    tracker = GroupTracker(PartitionGroup({_A: Span(0, 2), _B: Span(5, 5)}))
    assert tracker.try_claim(Claim({_A: 2}))
    assert tracker.try_claim(LAST)
    assert tracker.try_split(0.0) is None
    assert tracker.check_done()


def test_partitions_that_are_done_are_left_out_of_the_rest() -> None:
    tracker = GroupTracker(PartitionGroup({_A: Span(0, 2), _B: Span(5, 9)}))
    assert tracker.try_claim(Claim({_A: 2, _B: 6}))
    assert tracker.try_claim(LAST)
    _, rest = tracker.try_split(0.0)
    assert rest.spans == {_B: Span(6, 9)}


def test_offsets_that_are_neither_claimed_nor_deferred_are_an_error() -> None:
    tracker = GroupTracker(PartitionGroup({_A: Span(0, 2)}))
    assert tracker.try_claim(Claim({_A: 1}))
    with pytest.raises(ValueError, match="not claimed"):
        tracker.check_done()


@pytest.mark.parametrize("offset", [3, 11])
def test_a_claim_moves_forward_and_not_beyond_the_end(offset: int) -> None:
    tracker = GroupTracker(PartitionGroup({_A: Span(5, 10)}))
    with pytest.raises(InvalidArgument, match=f"up to offset {offset}, expected one from 5 to 10"):
        tracker.try_claim(Claim({_A: offset}))


def test_an_open_group_is_never_done_and_takes_new_partitions() -> None:
    tracker = GroupTracker(PartitionGroup({}, is_open=True))
    assert not tracker.is_bounded()
    assert tracker.try_claim(Claim(found={_A: Span(0)}))
    assert tracker.try_claim(Claim({_A: 7}, ends={_A: 20}))
    assert tracker.try_claim(Claim(found={_A: Span(0)}))  # known: it stays where it is
    assert tracker.current_restriction() == PartitionGroup({_A: Span(7, None, 20)}, is_open=True)
    assert tracker.current_restriction().backlog == 13
    with pytest.raises(ValueError, match="not claimed"):
        tracker.check_done()
    tracker.try_claim(LAST)
    claimed, rest = tracker.try_split(0.0)
    assert claimed == PartitionGroup({_A: Span(0, 7, 7)})
    assert rest == PartitionGroup({_A: Span(7, None, 20)}, is_open=True)


def test_an_open_group_ends_where_it_is_told() -> None:
    tracker = GroupTracker(PartitionGroup({_A: Span(5), _B: Span(9)}, is_open=True))
    assert tracker.try_claim(Claim(stops={_A: 8, _B: 3}))
    assert tracker.is_bounded()
    assert tracker.current_restriction().spans == {_A: Span(5, 8), _B: Span(9, 9)}
    assert tracker.try_claim(Claim({_A: 8}))
    assert tracker.check_done()


def test_progress_and_size_are_in_offsets() -> None:
    tracker = GroupTracker(PartitionGroup({_A: Span(5, 10), _B: Span(0, None, 3)}, is_open=True))
    assert tracker.try_claim(Claim({_A: 7}))
    progress = tracker.current_progress()
    assert (progress.completed_work, progress.remaining_work) == (2, 6)
    assert PartitionGroup({_A: Span(50, None, 3)}).backlog == 0


def test_a_reader_that_keeps_up_has_something_left() -> None:
    """Beam asks no reader to split whose progress is 1: its bundle would go on for as long as records come."""
    tracker = GroupTracker(PartitionGroup({_A: Span(5, None, 5)}, is_open=True))
    assert tracker.current_progress().fraction_completed == 0
    assert tracker.try_claim(Claim({_A: 7}, ends={_A: 7}))
    assert 0 < tracker.current_progress().fraction_completed < 1
    assert tracker.try_claim(Claim(stops={_A: 7}))
    assert tracker.current_progress().fraction_completed == 1


def test_groups_are_pickled() -> None:
    group = PartitionGroup({_A: Span(5, 10, 3)}, is_open=True)
    assert pickle.loads(pickle.dumps(group)) == group


_NOW = 1_800_000_000_000_000  # in microseconds


def record(timestamp: int, kind: int = 1) -> KafkaRecord:
    return KafkaRecord("t", 0, 0, timestamp, kind, None, b"v")


@pytest.mark.parametrize("kind", ["record", "log_append"])
@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [
        (0, 0),
        (1_700_000_000_123, 1_700_000_000_123_000),
        (-1, _NOW),  # no timestamp
        (-5, -5_000),  # before 1970
        (2**63 - 1, GlobalWindow().max_timestamp().micros),
        (-(2**63), MIN_TIMESTAMP.micros),
    ],
)
def test_times_of_records(kind: str, timestamp: int, expected: int) -> None:
    policy = TimestampPolicy.of(kind, 5)
    assert policy.micros(record(timestamp), _NOW) == expected
    tally = Tally()
    (element,) = Emitter(policy, None).emit([record(timestamp)], _NOW, tally)
    assert element.timestamp.micros == expected, "the quick path gives the same"
    assert tally.newest == expected


def test_one_unusual_time_does_not_change_the_others() -> None:
    emitter, tally = Emitter(TimestampPolicy.of("record", 5), None), Tally()
    elements = list(emitter.emit([record(7), record(-1), record(9)], _NOW, tally))
    assert [element.timestamp.micros for element in elements] == [7_000, _NOW, 9_000]
    assert tally.newest == _NOW


def test_processing_time_does_not_look_at_the_record() -> None:
    policy = TimestampPolicy.of("processing", 5)
    assert policy.micros(record(7), _NOW) == _NOW
    (element,) = Emitter(policy, None, values_only=True).emit([record(7)], _NOW, Tally())
    assert (element.value, element.timestamp.micros) == (b"v", _NOW)
    assert policy.watermark_after(_NOW, _NOW) == policy.watermark_when_idle(_NOW) == _NOW


@pytest.mark.parametrize("made", [12.5, Timestamp(12.5), datetime(1970, 1, 1, 0, 0, 12, 500_000, tzinfo=timezone.utc)])
def test_a_function_may_return_seconds_or_times(made: Any) -> None:
    assert TimestampPolicy.of(lambda record: made, 0).micros(record(7), _NOW) == 12_500_000


@pytest.mark.parametrize("made", [None, "noon", True, datetime(1970, 1, 1)])
def test_a_function_may_not_return_other_things(made: Any) -> None:
    with pytest.raises(InvalidType, match="from the function timestamps="):
        TimestampPolicy.of(lambda record: made, 0).micros(record(7), _NOW)


def test_watermarks_stay_behind_by_the_delay_and_within_the_clock() -> None:
    policy = TimestampPolicy.of("record", 5)
    assert policy.watermark_after(_NOW - 1_000_000, _NOW) == _NOW - 6_000_000
    assert policy.watermark_after(_NOW + 3_600_000_000, _NOW) == _NOW - 5_000_000, "a record from the future"
    assert policy.watermark_when_idle(_NOW) == _NOW - 5_000_000
    appended = TimestampPolicy.of("log_append", 5)
    assert appended.watermark_after(_NOW - 1_000_000, _NOW) == _NOW - 1_000_000
    assert appended.watermark_when_idle(_NOW) == _NOW - 5_000_000


def test_the_slowest_partition_holds_the_group_also_after_a_checkpoint() -> None:
    provider = GroupWatermarks()
    watermark = provider.create_watermark_estimator(provider.initial_estimator_state(0, None))
    watermark.expect([_A, _B])
    watermark.move(_A, 9_000_000)
    assert watermark.current_watermark() == MIN_TIMESTAMP
    watermark.move(_B, 4_000_000)
    watermark.move(_B, 3_000_000)
    assert watermark.current_watermark() == Timestamp(4)
    again = GroupWatermark(pickle.loads(pickle.dumps(watermark.get_estimator_state())))
    again.expect([_A, _B])
    again.move(_A, 20_000_000)
    assert again.current_watermark() == Timestamp(4)
    again.move(_B, 11_000_000)
    assert again.current_watermark() == Timestamp(11)


def test_a_new_partition_holds_the_watermark_but_does_not_move_it_back() -> None:
    watermark = GroupWatermark((5_000_000, {_A: 5_000_000}))
    watermark.expect([_B], reached=5_000_000)
    watermark.move(_A, 9_000_000)
    assert watermark.current_watermark() == Timestamp(5)
    watermark.move(_B, 1_000_000)
    assert watermark.current_watermark() == Timestamp(5)


def test_a_partition_that_is_read_to_its_end_holds_nothing() -> None:
    watermark = GroupWatermark((0, {_A: 5_000_000, _B: 9_000_000}))
    watermark.keep([_B])
    assert watermark.current_watermark() == Timestamp(9)
