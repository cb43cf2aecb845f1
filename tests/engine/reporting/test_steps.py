"""What a run records of its steps: the author's transforms, the time of each step, and the element that failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner, RunEnded, RunStarted
from luminosity.errors import StepFailed
from luminosity.events import Event
from luminosity.runs.views.step_times import slowest, step_times


class Enrich(beam.PTransform[Any, Any]):
    def expand(self, input_or_inputs: Any) -> Any:
        return input_or_inputs | "Slow" >> beam.Map(slow) | "Fast" >> beam.Map(lambda number: number)


def slow(number: int) -> int:
    until = time.thread_time() + 0.004
    while time.thread_time() < until:
        pass
    return number


def refuse(number: int) -> int:
    if number == 7:
        raise ValueError("no stars: password=hunter2")
    return number


def run(build: Callable[[beam.Pipeline], None], events: list[Event], *flags: str) -> None:
    pipeline = beam.Pipeline(
        runner=LuminosityRunner(on_event=events.append),
        options=PipelineOptions(["--run_dir=off", "--cpu_workers=1", *flags]),
    )
    build(pipeline)
    pipeline.run().wait_until_finish()


def test_a_run_tells_its_transforms_and_where_their_time_goes() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | "Make" >> beam.Create(range(100)) | beam.Reshuffle() | Enrich()
        _ = numbers | "Key" >> beam.Map(lambda number: (number % 3, number)) | beam.GroupByKey() | beam.Map(str)

    events: list[Event] = []
    run(build, events)
    started, ended = events[0], events[-1]
    assert isinstance(started, RunStarted)
    assert isinstance(ended, RunEnded)
    top = [(each.name, each.moves) for each in started.transforms if each.inside < 0]
    assert top == [
        ("Make", ""),
        ("Reshuffle", "reshuffle"),
        ("Enrich", ""),
        ("Key", ""),
        ("GroupByKey", "group"),
        ("Map(str)", ""),
    ]
    enrich = [each.name for each in started.transforms].index("Enrich")
    assert [each.name for each in started.transforms if each.inside == enrich] == ["Slow", "Fast"]
    times = step_times(started, ended.last)
    assert times[0].step == "Enrich/Slow"
    assert times[0].elements == 100
    assert 0.3 <= times[0].seconds <= sum(stage.busy_seconds for stage in ended.last.stages)
    assert sum(each.share for each in times) == pytest.approx(1.0)
    assert slowest(started, ended.last).startswith("Step 'Enrich/Slow' takes ")
    assert started.user


def test_bundles_that_share_a_worker_share_its_time() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | "Make" >> beam.Create(range(100)) | beam.Reshuffle() | "Slow" >> beam.Map(slow)

    events: list[Event] = []
    run(build, events, "--number_of_worker_harness_threads=4")
    started, ended = events[0], events[-1]
    assert isinstance(started, RunStarted)
    assert isinstance(ended, RunEnded)
    (seconds,) = [each.seconds for each in step_times(started, ended.last) if each.step == "Slow"]
    # Both are sums over bundles, a quarter of the time of each; so this holds whatever ran at the same time.
    assert 0 < seconds <= sum(stage.busy_seconds for stage in ended.last.stages)


def test_a_failed_run_tells_the_element_without_secrets() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        rows = pipeline | "Make" >> beam.Create([{"id": 7, "password": "hunter2"}])
        _ = rows | "Pick" >> beam.Map(lambda row: refuse(row["id"]))

    events: list[Event] = []
    with pytest.raises(StepFailed):
        run(build, events)
    ended = events[-1]
    assert isinstance(ended, RunEnded)
    assert ended.step == "Pick"
    assert ended.element.startswith("{'id': 7, 'password': ")
    assert "hunter2" not in ended.element
