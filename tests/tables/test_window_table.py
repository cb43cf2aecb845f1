"""Tests of WindowTable: rows go to the windows of their own times, however they come in batches."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.trigger import AccumulationMode, AfterCount, Repeatedly
from apache_beam.transforms.window import FixedWindows, GlobalWindows, Sessions, SlidingWindows, TimestampedValue

from luminosity import MapTable, WindowTable
from luminosity.errors import InvalidType, StepFailed, TableError
from luminosity.tables.schemas import known_schema
from tests.both_runners import Pipelines

TIMES = [0, 59, 60, 61, 119, 120, 5]  # in seconds; the last row came late


def batch(times: list[int | None], first: int = 0) -> pa.RecordBatch:
    micros = pa.array([None if time is None else time * 1_000_000 for time in times], pa.int64())
    numbers = pa.array(range(first, first + len(times)), pa.int64())
    return pa.record_batch({"n": numbers, "_timestamp": micros.cast(pa.timestamp("us", "UTC"))})


def rows_of_windows(table: Any) -> Any:
    """Pairs of a window's start and end and the sorted rows in it."""

    def pair(rows: pa.RecordBatch, window: Any = beam.DoFn.WindowParam) -> tuple[tuple[float, float], list[int]]:
        return (float(window.start), float(window.end)), rows["n"].to_pylist()

    def joined(window: Any, parts: Any) -> tuple[Any, list[int]]:
        return window, sorted(row for part in parts for row in part)

    pairs = table | "Pair" >> beam.Map(pair) | "Join" >> beam.WindowInto(GlobalWindows())
    return pairs | "Group" >> beam.GroupByKey() | "Sort" >> beam.MapTuple(joined)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_windows_of_rows_do_not_depend_on_batches(pipelines: Pipelines, size: int) -> None:
    batches = [batch(TIMES[at : at + size], at) for at in range(0, len(TIMES), size)]  # type: ignore[arg-type]
    with pipelines() as (pipeline, _):
        table = pipeline | beam.Create(batches) | WindowTable(FixedWindows(60))
        expected = [((0.0, 60.0), [0, 1, 6]), ((60.0, 120.0), [2, 3, 4]), ((120.0, 180.0), [5])]
        assert_that(rows_of_windows(table), equal_to(expected))


def test_windows_that_overlap_and_windows_that_merge() -> None:
    with beam.Pipeline("FnApiRunner") as pipeline:
        rows = pipeline | beam.Create([batch([0, 59, 61])])
        sliding = rows | WindowTable(SlidingWindows(60, 30))
        expected = [((-30.0, 30.0), [0]), ((0.0, 60.0), [0, 1]), ((30.0, 90.0), [1, 2]), ((60.0, 120.0), [2])]
        assert_that(rows_of_windows(sliding), equal_to(expected), label="sliding")
        sessions = (
            rows
            | "Sessions" >> WindowTable(Sessions(10))
            | beam.WithKeys(0)
            | beam.GroupByKey()
            | beam.MapTuple(lambda _, parts: sorted(row for part in parts for row in part["n"].to_pylist()))
        )
        assert_that(sessions, equal_to([[0], [1, 2]]), label="sessions")


def test_a_row_without_a_time_has_the_time_of_its_batch_and_a_batch_in_one_window_is_not_split() -> None:
    with beam.Pipeline("FnApiRunner") as pipeline:
        rows = pipeline | beam.Create([batch([61, None]), batch([None], 2)])
        table = rows | beam.Map(lambda rows: TimestampedValue(rows, 61)) | WindowTable(FixedWindows(60))
        numbers = table | beam.Map(lambda rows, time=beam.DoFn.TimestampParam: (float(time), rows["n"].to_pylist()))
        assert_that(numbers, equal_to([(61.0, [0, 1]), (61.0, [2])]))


def test_the_trigger_and_the_columns_are_passed_on() -> None:
    pipeline = beam.Pipeline()
    schema = batch([]).schema
    rows = pipeline | beam.Create([batch([1])]) | MapTable(lambda rows: rows, schema=schema)
    trigger = Repeatedly(AfterCount(2))
    table = rows | WindowTable(FixedWindows(60), trigger=trigger, accumulation_mode=AccumulationMode.DISCARDING)
    assert table.windowing.triggerfn == trigger
    assert known_schema(table) == schema
    assert table.element_type == pa.RecordBatch


def test_mistakes() -> None:
    with pytest.raises(InvalidType, match=r"found 60, expected windows, such as FixedWindows\(60\)"):
        WindowTable(60)  # type: ignore[arg-type]
    message = "found the columns n, expected '_timestamp'"
    with pytest.raises((StepFailed, TableError), match=message), beam.Pipeline() as pipeline:
        _ = pipeline | beam.Create([pa.record_batch({"n": [1]})]) | WindowTable(FixedWindows(60))
