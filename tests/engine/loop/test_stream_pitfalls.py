"""Streams that other runners are known to get wrong: empty sources, endless impulses, timers that fire early."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.testing import test_stream
from apache_beam.transforms import trigger, userstate, window
from apache_beam.transforms.periodicsequence import PeriodicImpulse
from apache_beam.transforms.timeutil import TimeDomain

from tests.runners import IS_REFERENCE, finished, new_pipeline

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="Beam's local runner has no streams")


def _append(element: Any, path: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{element}\n")


@pytest.mark.parametrize("empty", ["bounded", "unbounded"])
def test_an_empty_source_beside_a_full_one_holds_nothing_back(empty: str, tmp_path: Path) -> None:
    """The first window comes before the element that the stream sends after the end of that window."""
    seen = str(tmp_path / "seen")
    pipeline = new_pipeline("--debug")
    full = (
        pipeline
        | "Full"
        >> test_stream.TestStream()
        .add_elements([window.TimestampedValue("first", 1)])
        # The other stream ends after its only event.
        .advance_processing_time(1)
        .advance_watermark_to(10)
        .add_elements([window.TimestampedValue("second", 11)])
        .advance_watermark_to_infinity()
    )
    other = (
        pipeline | beam.Create([]).with_output_types(str)
        if empty == "bounded"
        else pipeline | "Empty" >> test_stream.TestStream().advance_watermark_to_infinity()
    )
    both = (full, other) | beam.Flatten() | beam.WindowInto(window.FixedWindows(10))
    _ = both | "Element" >> beam.Map(_append, seen)
    grouped = both | beam.WithKeys(0) | beam.GroupByKey() | beam.MapTuple(lambda _, values: f"window of {list(values)}")
    _ = grouped | "Window" >> beam.Map(_append, seen)
    finished(pipeline.run())
    found = Path(seen).read_text().splitlines()
    assert found == ["first", "window of ['first']", "second", "window of ['second']"]


def _sleep_less_each_time(pair: tuple[str, int]) -> tuple[str, int]:
    """Take long for the first of three elements, so that the others would overtake it in another worker."""
    time.sleep((0.3, 0.2, 0.1)[pair[1] % 3])
    return pair


def test_the_elements_of_an_event_stay_in_their_order(tmp_path: Path) -> None:
    """One event's elements go through one worker, though others are free and each element is slow."""
    seen = tmp_path / "seen"
    pipeline = new_pipeline("--cpu_workers=2")
    stream = test_stream.TestStream().advance_watermark_to(0)
    for first in (0, 3, 6, 9):
        stream = stream.add_elements([("key", first), ("key", first + 1), ("key", first + 2)])
    _ = (
        pipeline
        | stream.advance_watermark_to_infinity()
        | beam.Map(_sleep_less_each_time)
        | beam.WindowInto(
            window.FixedWindows(10),
            trigger=trigger.Repeatedly(trigger.AfterCount(3)),
            accumulation_mode=trigger.AccumulationMode.DISCARDING,
        )
        | beam.GroupByKey()
        | beam.MapTuple(lambda _, values: list(values))
        | beam.Map(_append, str(seen))
    )
    finished(pipeline.run())
    assert seen.read_text().splitlines() == ["[0, 1, 2]", "[3, 4, 5]", "[6, 7, 8]", "[9, 10, 11]"]


def test_an_endless_impulse_behind_a_reshuffle_gives_elements_while_it_runs(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    pipeline = new_pipeline("--cpu_workers=1")
    _ = pipeline | PeriodicImpulse(fire_interval=0.05) | beam.Reshuffle() | beam.Map(_append, str(seen))
    result = pipeline.run()
    try:
        deadline = time.monotonic() + 100
        while (len(seen.read_text().splitlines()) if seen.exists() else 0) < 5:
            assert result.state == "RUNNING"
            assert time.monotonic() < deadline, "found fewer than 5 elements, expected one every 50 ms"
            time.sleep(0.02)
    finally:
        assert result.cancel() == "CANCELLED"


class _SetTimers(beam.DoFn):
    """Sets a timer in event time and one in processing time, each at the time that the element says."""

    EVENT = userstate.TimerSpec("event", TimeDomain.WATERMARK)
    CLOCK = userstate.TimerSpec("clock", TimeDomain.REAL_TIME)

    def __init__(self, path: str) -> None:
        self._path = path

    def process(
        self,
        element: tuple[int, int],
        event: Any = beam.DoFn.TimerParam(EVENT),  # noqa: B008
        clock: Any = beam.DoFn.TimerParam(CLOCK),  # noqa: B008
    ) -> None:
        if element[1]:
            event.set(element[1])
            clock.set(element[1])
        else:
            _append("element", self._path)

    @userstate.on_timer(EVENT)
    def on_event(self) -> None:
        _append("event", self._path)

    @userstate.on_timer(CLOCK)
    def on_clock(self) -> None:
        _append("clock", self._path)


def test_timers_never_fire_early(tmp_path: Path) -> None:
    """A timer of processing time fires at its time, one of event time when no element of its time can come any more."""
    seen = tmp_path / "seen"
    marker = window.TimestampedValue((0, 0), 100)
    pipeline = new_pipeline("--debug")
    _ = (
        pipeline
        | test_stream.TestStream()
        .advance_watermark_to(0)
        .add_elements([window.TimestampedValue((0, 10), 1)])
        .advance_watermark_to(10)
        .add_elements([marker])
        .advance_watermark_to(10.001)
        .add_elements([marker])
        .advance_processing_time(9.999)
        .add_elements([marker])
        .advance_processing_time(0.001)
        .add_elements([marker])
        .advance_watermark_to_infinity()
        | beam.ParDo(_SetTimers(str(seen)))
    )
    finished(pipeline.run())
    assert seen.read_text().split() == ["element", "event", "element", "element", "clock", "element"]
