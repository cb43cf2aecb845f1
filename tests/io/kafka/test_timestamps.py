"""Event times of records, and the watermarks that follow from them."""

from __future__ import annotations

import pickle
from datetime import datetime, timezone
from typing import Any

import pytest
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp

from luminosity import KafkaRecord
from luminosity.errors import InvalidType
from luminosity.io.kafka.reading.emit import Emitter, Tally
from luminosity.io.kafka.reading.timestamps import GroupWatermark, GroupWatermarks, TimestampPolicy

_NOW = 1_800_000_000_000_000  # in microseconds
_A, _B = ("t", 0), ("t", 1)


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
