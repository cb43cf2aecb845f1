"""Warnings about streams before a run: what runs, but not as the author may expect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.transforms.periodicsequence import PeriodicImpulse

from luminosity import LuminosityRunner
from luminosity.engine.prepare import prepare


class _Ranges(RestrictionProvider):
    def initial_restriction(self, element: Any) -> OffsetRange:
        return OffsetRange(0, 100)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: Any, restriction: OffsetRange) -> int:
        return 1


_RANGES = beam.DoFn.RestrictionParam(_Ranges())


class Blocking(beam.DoFn):
    @beam.DoFn.unbounded_per_element()
    def process(self, element: Any, tracker: Any = _RANGES) -> Iterator[int]:
        yield 1


class Deferring(beam.DoFn):
    @beam.DoFn.unbounded_per_element()
    def process(self, element: Any, tracker: Any = _RANGES) -> Iterator[int]:
        def end() -> None:
            tracker.defer_remainder()

        yield 1
        end()


class Inheriting(Deferring):
    pass


class Bounded(beam.DoFn):
    def process(self, element: Any, tracker: Any = _RANGES) -> Iterator[int]:
        yield 1


def warnings_of(source: Any, caplog: pytest.LogCaptureFixture, *flags: str) -> list[str]:
    options = PipelineOptions([*flags, "--allow_unsafe_triggers"])
    pipeline = beam.Pipeline(options=options)
    _ = pipeline | "Source" >> source | beam.Map(str)
    environment = LuminosityRunner().default_environment(options)
    caplog.clear()
    prepare(pipeline.to_runner_api(default_environment=environment), options)
    return [record.getMessage() for record in caplog.records if "apache_beam" not in record.name]


def _after_create(do_fn: beam.DoFn) -> Any:
    class Source(beam.PTransform[Any, Any]):
        def expand(self, input_or_inputs: Any) -> Any:
            return input_or_inputs | beam.Create([0]) | "Sdf" >> beam.ParDo(do_fn)

    return Source()


def test_streaming_with_bounded_sources_has_no_effect_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(beam.Create([1]), caplog, "--streaming")
    assert warning.startswith("--streaming: no effect here, since all sources of the pipeline are bounded")
    assert not warnings_of(beam.Create([1]), caplog)
    assert not warnings_of(PeriodicImpulse(), caplog, "--streaming")
    assert not warnings_of(TestStream(), caplog, "--streaming")


def test_a_source_that_never_defers_is_named_with_debug(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(_after_create(Blocking()), caplog, "--debug")
    assert warning.startswith("'Source/Sdf': this source has no end and does not call defer_remainder")
    assert not warnings_of(_after_create(Blocking()), caplog)
    for source in (
        _after_create(Deferring()),
        _after_create(Inheriting()),
        _after_create(Bounded()),
        PeriodicImpulse(),
    ):
        assert not warnings_of(source, caplog, "--debug")
