"""Tests of refusals: a pipeline that can't run is refused before anything starts, and the message says why."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity.errors import OptionError, UnsupportedPipeline
from tests.marks import note
from tests.runners import IS_REFERENCE, finished, new_runner, run

pytestmark = [
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing"),
]


def test_a_flatten_of_different_windows_is_refused(tmp_path: Path) -> None:
    """Otherwise the elements would be written in one encoding and read in another."""
    ran = tmp_path / "ran"

    def build(pipeline: beam.Pipeline) -> None:
        everything = pipeline | "All" >> beam.Create([1])
        minutes = pipeline | "Minutes" >> beam.Create([2]) | beam.WindowInto(beam.window.FixedWindows(60))
        _ = (everything, minutes) | "Both" >> beam.Flatten()
        pipeline | beam.Create([1]) | beam.Map(lambda _: note(ran))

    with pytest.raises(UnsupportedPipeline, match=r"'Both'.*fixed_windows, global_windows.*WindowInto"):
        run(build, "--cpu_workers=1")
    assert not ran.exists()


def test_a_flatten_of_windows_that_are_encoded_alike_runs() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        sessions = pipeline | "Sessions" >> beam.Create([1]) | "A" >> beam.WindowInto(beam.window.Sessions(60))
        minutes = pipeline | "Minutes" >> beam.Create([2]) | "B" >> beam.WindowInto(beam.window.FixedWindows(60))
        _ = (sessions, minutes) | "Both" >> beam.Flatten() | beam.Map(str)

    assert run(build, "--cpu_workers=1").state == "DONE"


@pytest.mark.parametrize(
    ("flag", "allowed"),
    [
        ("--cpu_workers=0", ["1"]),
        ("--cpu_workers=many", ["1"]),
        ("--accelerators=-1", ["0"]),
        ("--missing_resources=maybe", ["warn", "fail"]),
        ("--progress=loud", ["auto", "plain", "off"]),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(flag: str, allowed: list[str], tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    name, _, found = flag.removeprefix("--").partition("=")

    def run_with_flag() -> None:
        # Without the flags that all other tests set, which could hide this one.
        pipeline = beam.Pipeline(runner=new_runner(), options=PipelineOptions([flag]))
        pipeline | beam.Create([1]) | beam.Map(lambda _: note(ran))
        finished(pipeline.run())

    with pytest.raises(OptionError) as caught:
        run_with_flag()
    message = str(caught.value)
    assert name in message
    assert found in message
    for value in allowed:
        assert value in message.replace(found, "")
    assert not ran.exists()
