"""Tests of plans of streams: which stages have no end, and which windows and triggers their groupings have."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import pytest
from apache_beam.testing import test_stream
from apache_beam.transforms import trigger, window
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.periodicsequence import PeriodicImpulse

from luminosity.engine.explain.explain import PipelinePlan
from luminosity.engine.explain.export import dot
from luminosity.engine.explain.reasons import when_in_words, windows_in_words
from luminosity.engine.explain.svg import svg
from tests.plans import break_between, explained, pairs, same, stage_with


def a_stream(pipeline: beam.Pipeline) -> None:
    """A stream that is grouped, beside a branch with an end."""
    key = beam.Map(lambda tick: (1, 1)).with_output_types(tuple[int, int])
    ticks = pipeline | "Tick" >> PeriodicImpulse(fire_interval=1) | "Key" >> key
    windowed = ticks | "Window" >> beam.WindowInto(window.SlidingWindows(60, 10))
    _ = windowed | "Group" >> beam.GroupByKey() | "After" >> beam.Map(same)
    _ = pairs(pipeline, "Short") | "Batch" >> beam.GroupByKey() | "After batch" >> beam.Map(same)


def test_stages_of_a_stream_are_marked_and_others_are_not() -> None:
    plan = explained(a_stream)
    streams = {step.name for stage in plan.stages if stage.is_stream for step in stage.steps}
    assert {"Tick", "Key", "Window", "After"} <= streams
    assert not {"Short", "After batch"} & streams
    assert plan.streams == tuple(stage.number for stage in plan.stages if stage.is_stream)


def test_a_grouping_of_a_stream_says_its_windows_and_when_it_emits() -> None:
    plan = explained(a_stream)
    (reason,) = break_between(plan, "Window", "After").reasons
    assert reason.text == (
        "GroupByKey 'Group' needs all values of a key, in sliding windows of 60 s every 10 s; "
        "it emits them when a window ends"
    )
    (reason,) = break_between(plan, "Short", "After batch").reasons
    assert reason.text == "GroupByKey 'Batch' needs all values of a key; workers group it if it is large"


def test_a_combine_of_a_test_stream_says_its_trigger() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        stream = test_stream.TestStream().add_elements([("a", 1)]).advance_watermark_to_infinity()
        repeated = beam.WindowInto(
            window.GlobalWindows(),
            trigger=trigger.Repeatedly(trigger.AfterCount(3)),
            accumulation_mode=trigger.AccumulationMode.DISCARDING,
        )
        _ = pipeline | stream | "Window" >> repeated | "Sum" >> beam.CombinePerKey(sum) | "After" >> beam.Map(same)

    plan = explained(build)
    (reason,) = break_between(plan, "Window", "Sum").reasons  # counts need single elements
    assert reason.text.endswith("in the global window; it emits them again and again after 3 elements")
    assert stage_with(plan, "After").is_stream


def test_text_and_pictures_say_which_stages_are_a_stream() -> None:
    plan = explained(a_stream)
    printed = str(PipelinePlan(plan, "watch.py"))
    assert "It has no end: stages " in printed
    assert " stream, " in printed
    assert dot({"p": plan}).count("(stream)") == svg({"p": plan}).count(">stream<") == len(plan.streams) > 0
    batch = str(PipelinePlan(explained(pairs), "batch.py"))
    assert "stream" not in batch


_COUNT, _DELAY = trigger.AfterCount(2), trigger.AfterProcessingTime(5)


@pytest.mark.parametrize(
    ("windows", "triggerfn", "expected"),
    [
        (window.GlobalWindows(), None, "when the stream ends"),
        (window.Sessions(3), trigger.AfterWatermark(), "when a window ends"),
        (
            window.FixedWindows(1),
            trigger.AfterWatermark(early=_COUNT),
            "when a window ends (before: again and again after 2 elements)",
        ),
        (window.FixedWindows(1), _DELAY, "5 s after an element"),
        (window.FixedWindows(1), trigger.AfterProcessingTime(0), "soon after an element"),
        (window.FixedWindows(1), trigger.Always(), "with every element"),
        (window.FixedWindows(1), trigger.AfterAny(_COUNT, _DELAY), "after 2 elements or 5 s after an element"),
        (window.FixedWindows(1), trigger.AfterAll(_COUNT, _DELAY), "after 2 elements and 5 s after an element"),
        (window.FixedWindows(1), trigger.AfterEach(_COUNT, _DELAY), "after 2 elements, then 5 s after an element"),
        (
            window.FixedWindows(1),
            trigger.OrFinally(trigger.Repeatedly(_COUNT), _DELAY),
            "again and again after 2 elements, until 5 s after an element",
        ),
    ],
)
def test_triggers_in_words(windows: Any, triggerfn: Any, expected: str) -> None:
    mode = trigger.AccumulationMode.DISCARDING
    assert when_in_words(Windowing(windows, triggerfn, mode)) == expected


def test_late_elements_and_accumulation_in_words() -> None:
    windowing = Windowing(
        window.FixedWindows(1), accumulation_mode=trigger.AccumulationMode.ACCUMULATING, allowed_lateness=90
    )
    assert when_in_words(windowing) == (
        "when a window ends, with all values so far each time; late elements count for 90 s"
    )


class Daily(window.NonMergingWindowFn):
    def assign(self, assign_context: Any) -> list[Any]:
        return []

    def get_window_coder(self) -> Any:
        return beam.coders.coders.IntervalWindowCoder()


def test_own_windows_have_their_name() -> None:
    assert windows_in_words(Windowing(Daily())) == "windows of Daily"
