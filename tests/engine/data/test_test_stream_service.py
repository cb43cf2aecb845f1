"""Tests of TestStreams whose events come from a service: ``TestStream(endpoint=...)``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.testing import test_stream, test_stream_service
from apache_beam.transforms import trigger, window

from luminosity.errors import RunFailed
from tests.processes import wait_for
from tests.runners import IS_REFERENCE, finished, new_pipeline

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="Beam's local runner has no TestStream")

_CODER = beam.coders.FastPrimitivesCoder()
_Event = beam_runner_api_pb2.TestStreamPayload.Event


def _elements(*values: tuple[Any, float], tag: str = "None") -> _Event:
    """Return an event as a service sends it: in microseconds, unlike those that a pipeline lists."""
    event = _Event()
    event.element_event.tag = tag
    for value, seconds in values:
        event.element_event.elements.add(encoded_element=_CODER.encode(value), timestamp=round(seconds * 1e6))
    return event


def _watermark(seconds: float, tag: str = "None") -> _Event:
    event = _Event()
    event.watermark_event.tag = tag
    event.watermark_event.new_watermark = round(seconds * 1e6)
    return event


def _processing_time(seconds: float) -> _Event:
    event = _Event()
    event.processing_time_event.advance_duration = round(seconds * 1e6)
    return event


class _Reader:
    """The events of a service, read by Beam's controller of it."""

    def __init__(self, events: Callable[[], Iterable[_Event]]) -> None:
        self._events = events
        self.requests: list[list[Any]] = []

    def read_multiple(self, labels: list[Any]) -> Iterator[_Event]:
        self.requests.append(labels)
        yield from self._events()


@contextmanager
def _service(events: Callable[[], Iterable[_Event]]) -> Generator[tuple[str, _Reader]]:
    reader = _Reader(events)
    controller = test_stream_service.TestStreamServiceController(reader)
    controller.start()
    try:
        yield controller.endpoint, reader
    finally:
        controller.stop()


def _append(values: Any, path: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{values}\n")


def test_panes_come_as_the_services_events_say(tmp_path: Path) -> None:
    events = [
        _elements(("a", 1), ("b", 2)),
        _processing_time(5),
        _elements(("c", 3)),
        _watermark(10),
        _elements(("late", 4), ("next", 12)),
        _watermark(30),
    ]
    out = tmp_path / "panes"
    with _service(lambda: events) as (endpoint, _):
        pipeline = new_pipeline("--debug")
        _ = (
            pipeline
            | test_stream.TestStream(coder=_CODER, endpoint=endpoint)
            | beam.WindowInto(
                window.FixedWindows(10),
                trigger=trigger.AfterWatermark(early=trigger.AfterProcessingTime(5), late=trigger.AfterCount(1)),
                accumulation_mode=trigger.AccumulationMode.DISCARDING,
                allowed_lateness=60,
            )
            | beam.WithKeys(0)
            | beam.GroupByKey()
            | beam.MapTuple(lambda _, values: "".join(sorted(values)))
            | beam.Map(_append, path=str(out))
        )
        finished(pipeline.run())
    assert out.read_text().split() == ["ab", "c", "late", "next"]


def test_tags_are_requested_and_kept_apart(tmp_path: Path) -> None:
    events = [_elements((1, 0), tag="left"), _elements((2, 0), tag="right"), _elements((3, 0), tag="left")]
    out = tmp_path / "values"
    with _service(lambda: events) as (endpoint, reader):
        pipeline = new_pipeline("--debug")
        both: Any = pipeline | test_stream.TestStream(coder=_CODER, output_tags=["left", "right"], endpoint=endpoint)
        for tag in ("left", "right"):
            named = both[tag] | tag >> beam.Map(lambda n, tag: f"{tag}{n}", tag)
            _ = named | f"Write {tag}" >> beam.Map(_append, str(out))
        finished(pipeline.run())
    assert out.read_text().split() == ["left1", "right2", "left3"]
    assert reader.requests == [[("full", "left"), ("full", "right")]]


def test_results_come_while_the_service_is_silent(tmp_path: Path) -> None:
    """The service sends its second event only after the result of the first is seen; worker processes run steps."""
    out = tmp_path / "values"
    timeouts: list[str] = []

    def events() -> Iterator[_Event]:
        yield _elements(("first", 0))
        if not wait_for(out.exists, timeout_s=100):
            timeouts.append("the first element was not processed")
        yield _elements(("second", 0))

    with _service(events) as (endpoint, _):
        pipeline = new_pipeline("--cpu_workers=1")
        _ = pipeline | test_stream.TestStream(coder=_CODER, endpoint=endpoint) | beam.Map(_append, str(out))
        finished(pipeline.run())
    assert out.read_text().split() == ["first", "second"]
    assert not timeouts


def test_a_run_that_waits_for_a_service_can_be_cancelled() -> None:
    released, waits = threading.Event(), threading.Event()

    def events() -> Iterator[_Event]:
        yield _elements(("first", 0))
        waits.set()
        released.wait(100)

    try:
        with _service(events) as (endpoint, _):
            pipeline = new_pipeline("--cpu_workers=1")
            _ = pipeline | test_stream.TestStream(coder=_CODER, endpoint=endpoint) | beam.Map(str)
            result = pipeline.run()
            assert waits.wait(100)
            assert result.cancel() == "CANCELLED"
            names = [thread.name for thread in threading.enumerate()]
            assert f"events of {endpoint}" not in names
            released.set()
    finally:
        released.set()


def test_a_service_that_is_not_there_fails_the_run() -> None:
    pipeline = new_pipeline("--debug")
    _ = pipeline | "Served" >> test_stream.TestStream(coder=_CODER, endpoint="localhost:1") | beam.Map(str)
    with pytest.raises(RunFailed, match="'Served': found no events at localhost:1, expected a TestStreamService"):
        finished(pipeline.run())


def test_a_service_that_fails_fails_the_run() -> None:
    def events() -> Iterator[_Event]:
        yield _elements(("first", 0))
        raise ValueError("broken recording")

    with _service(events) as (endpoint, _):
        pipeline = new_pipeline("--debug")
        _ = pipeline | test_stream.TestStream(coder=_CODER, endpoint=endpoint) | beam.Map(str)
        with pytest.raises(RunFailed, match="broken recording"):
            finished(pipeline.run())
