"""Regression tests: each runs the smallest pipeline that showed a bug."""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsIter
from apache_beam.transforms import trigger, window
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.utils.timestamp import MAX_TIMESTAMP

from luminosity import LuminosityRunner
from luminosity.errors import ElementKillsWorker
from tests.marks import note, notes
from tests.runners import IS_REFERENCE, collect, finished, flags, new_pipeline, run

pytestmark = [
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing"),
]

_SIZE = beam.DoFn.StateParam(ReadModifyWriteStateSpec("size", beam.coders.VarIntCoder()))
_LAST = TimerSpec("last", TimeDomain.WATERMARK)
_LAST_PARAM = beam.DoFn.TimerParam(_LAST)


class SizeOfGroup(beam.DoFn):
    def process(self, group: tuple[int, Iterable[bytes]], size: Any = _SIZE) -> Iterable[tuple[int, int]]:
        size.write(sum(map(len, group[1])))
        yield group[0], size.read()


def test_a_large_group_lives_until_a_stateful_step_has_read_it(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> beam.PCollection:
        pairs = pipeline | beam.Create([(key, b"x" * 1000) for key in range(4) for _ in range(200)])
        return pairs | beam.GroupByKey() | beam.ParDo(SizeOfGroup())

    found = collect(build, tmp_path, new_pipeline("--cpu_workers=2"))
    assert Counter(found) == Counter((key, 200_000) for key in range(4))


def test_a_side_input_of_several_pages_is_read_by_every_bundle(tmp_path: Path) -> None:
    def use(number: int, parts: Iterable[bytes]) -> tuple[int, int]:
        time.sleep(0.01)  # several bundles
        return number, len(list(parts))

    def build(pipeline: beam.Pipeline) -> beam.PCollection:
        parts = pipeline | "Side" >> beam.Create(range(12)) | beam.Map(lambda n: bytes([n]) * 1_000_000)
        return pipeline | beam.Create(range(50)) | "Use" >> beam.Map(use, AsIter(parts))

    found = collect(build, tmp_path, new_pipeline("--cpu_workers=1"))
    assert Counter(found) == Counter((n, 12) for n in range(50))


class FiveOffsets(RestrictionProvider):
    def initial_restriction(self, element: int) -> OffsetRange:
        return OffsetRange(0, 5)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: int, restriction: OffsetRange) -> int:
        return restriction.size()


_RESTRICTION = beam.DoFn.RestrictionParam(FiveOffsets())


class SlowToStart(beam.DoFn):
    """Takes longer to open its source than the deadline of a first bundle."""

    def process(self, element: int, tracker: Any = _RESTRICTION) -> Iterable[int]:
        time.sleep(1.2)
        position = tracker.current_restriction().start
        while tracker.try_claim(position):
            yield position
            position += 1


def test_a_source_that_is_slow_to_open_gets_the_time(tmp_path: Path) -> None:
    build = lambda p: p | beam.Create([1]) | beam.ParDo(SlowToStart())  # noqa: E731
    assert sorted(collect(build, tmp_path, new_pipeline("--cpu_workers=1"))) == [0, 1, 2, 3, 4]


class AtTheEndOfTime(beam.DoFn):
    def process(self, element: tuple[int, int], last: Any = _LAST_PARAM) -> Iterable[tuple[str, str]]:
        last.set(MAX_TIMESTAMP)
        yield "all", "element"

    @on_timer(_LAST)
    def at_the_end(self) -> Iterable[tuple[str, str]]:
        yield "all", "timer"


def test_a_grouping_waits_for_a_timer_at_the_end_of_time(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> beam.PCollection:
        grouped = pipeline | beam.Create([(1, 1)]) | beam.ParDo(AtTheEndOfTime()) | beam.GroupByKey()
        return grouped | beam.MapTuple(lambda _, parts: sorted(parts))

    assert collect(build, tmp_path, new_pipeline("--cpu_workers=1")) == [["element", "timer"]]


class PathOptions(PipelineOptions):
    @classmethod
    def _add_argparse_args(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--regression_paths", type=Path, nargs="*", default=[])


def test_an_option_that_is_not_json_stays_here() -> None:
    options = PipelineOptions([*flags(), "--regression_paths", "a", "b"])
    options.view_as(PathOptions)
    for _ in range(2):
        pipeline = beam.Pipeline(runner=LuminosityRunner(), options=options)
        _ = pipeline | beam.Create([1]) | beam.Map(str)
        assert finished(pipeline.run()).state == "DONE"


def test_no_threads_are_left_by_runs() -> None:
    run(lambda p: p | beam.Create([1]), "--cpu_workers=1")
    before = threading.active_count()
    for _ in range(3):
        run(lambda p: p | beam.Create([1]), "--cpu_workers=1")
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert threading.active_count() <= before


def test_a_neighbour_in_the_worker_is_not_blamed_for_its_end(tmp_path: Path) -> None:
    """Two bundles share a worker: one kills it on every attempt, the other is only slow."""
    deaths = tmp_path / "deaths"

    def handle(element: str) -> str:
        if element == "deadly":
            note(deaths)
            time.sleep(0.05)
            import os

            os._exit(3)
        time.sleep(0.3)
        return element

    def build(pipeline: beam.Pipeline) -> None:
        created = pipeline | beam.Create(["deadly", "innocent", "harmless", "quiet"]) | beam.Reshuffle()
        _ = created | "Handle" >> beam.Map(handle)

    with pytest.raises(ElementKillsWorker) as caught:
        run(build, "--cpu_workers=1", "--number_of_worker_harness_threads=2")
    assert "innocent" not in str(caught.value)
    assert len(notes(deaths)) >= 4


def test_stages_whose_side_inputs_cross_do_not_wait_for_each_other(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> beam.PCollection:
        one, other = pipeline | "One" >> beam.Create([1]), pipeline | "Other" >> beam.Create([2])
        half, other_half = one | "Half" >> beam.Map(lambda x: x), other | "Other half" >> beam.Map(lambda x: x)
        first = one | "First" >> beam.Map(lambda x, side: (x, *side), AsIter(other_half))
        second = other | "Second" >> beam.Map(lambda x, side: (x, *side), AsIter(half))
        return (first, second) | beam.Flatten()

    assert sorted(collect(build, tmp_path, new_pipeline())) == [(1, 2), (2, 1)]


def test_large_groups_may_be_grouped_again(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> beam.PCollection:
        groups = pipeline | beam.Create([(0, bytes(1000))] * 100) | "Once" >> beam.GroupByKey()
        twice = groups | "Again" >> beam.GroupByKey()
        sizes = twice | beam.MapTuple(lambda key, lists: ("twice", [len(list(values)) for values in lists]))
        other = groups | "Beside" >> beam.MapTuple(lambda key, values: ("once", [len(list(values))]))
        return (sizes, other) | beam.Flatten()

    assert sorted(collect(build, tmp_path, new_pipeline())) == [("once", [100]), ("twice", [100])]


_END = TimerSpec("end", TimeDomain.WATERMARK)
_END_PARAM = beam.DoFn.TimerParam(_END)


class CountedAtTheEnd(beam.DoFn):
    """Yields how many elements had arrived when the watermark passed 1000 s."""

    def process(self, pair: tuple[str, int], size: Any = _SIZE, last: Any = _END_PARAM) -> None:
        size.write((size.read() or 0) + 1)
        last.set(1000)

    @on_timer(_END)
    def at_last(self, size: Any = _SIZE) -> Iterable[int]:
        yield size.read()


def test_time_waits_for_what_a_grouping_has_not_looked_into_yet(tmp_path: Path) -> None:
    """The earliest elements arrive last, in blocks that the grouping has not absorbed yet."""
    count = 60_000

    def build(pipeline: beam.Pipeline) -> beam.PCollection:
        late_first = beam.FlatMap(lambda _: ((n % 1000, n) for n in range(count)))
        grouped = (
            pipeline
            | beam.Create([0])
            | late_first
            | beam.Map(lambda pair: window.TimestampedValue(pair, 5000 if pair[1] < count - 1000 else 1))
            | beam.WindowInto(window.FixedWindows(10))
            | beam.GroupByKey()
            | "As pair" >> beam.Map(lambda _: ("key", 0)).with_output_types(tuple[str, int])
            | "Global" >> beam.WindowInto(window.GlobalWindows())
        )
        early = (
            pipeline
            | "Early" >> beam.Create([("key", 0)])
            | "Stamp" >> beam.Map(lambda pair: window.TimestampedValue(pair, 5)).with_output_types(tuple[str, int])
        )
        return (early, grouped) | beam.Flatten() | beam.ParDo(CountedAtTheEnd())

    counts = collect(build, tmp_path, new_pipeline())
    assert min(counts) >= 1001  # the early element and the groups of the first window


@pytest.mark.skipif(IS_REFERENCE, reason="Beam's own runner fails at these triggers")
@pytest.mark.parametrize(
    ("windows", "of", "panes"),
    [
        (window.FixedWindows(3), trigger.AfterWatermark(early=trigger.AfterProcessingTime(1)), [[0, 1, 2], [3, 4]]),
        (window.GlobalWindows(), trigger.Repeatedly(trigger.AfterProcessingTime(60)), [[0, 1, 2, 3, 4]]),
        (
            window.Sessions(9),
            trigger.Repeatedly(trigger.AfterAny(trigger.AfterProcessingTime(60), trigger.AfterCount(2))),
            [[0, 1, 2, 3, 4]],
        ),
    ],
)
def test_triggers_of_processing_time_fire_once_for_bounded_input(
    windows: Any, of: Any, panes: list[list[int]], tmp_path: Path
) -> None:
    def build(pipeline: beam.Pipeline) -> beam.PCollection:
        return (
            pipeline
            | beam.Create(range(5))
            | beam.Map(lambda number: window.TimestampedValue(("key", number), number))
            | beam.WindowInto(windows, trigger=of, accumulation_mode=trigger.AccumulationMode.DISCARDING)
            | beam.GroupByKey()
            | "Values" >> beam.Map(lambda group: sorted(group[1]))
            | "Global" >> beam.WindowInto(window.GlobalWindows(), trigger=trigger.DefaultTrigger())
        )

    assert sorted(collect(build, tmp_path, new_pipeline())) == panes
