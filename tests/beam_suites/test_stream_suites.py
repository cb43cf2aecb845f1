"""Beam's own tests of streams on our runner: TestStream, triggers, and what is built on them."""

from __future__ import annotations

import unittest

import pytest
from apache_beam.options.pipeline_options import StandardOptions

from tests.beam_suites.imported import imported, names_of_tests, taken_over
from tests.runners import IS_REFERENCE

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(IS_REFERENCE, reason="Beam's local runner has no TestStream"),
]

_MODULES = (
    "apache_beam.testing.test_stream_test",
    "apache_beam.transforms.trigger_test",
)
_LEFT_OUT = {
    "ReverseTestStreamTest": "a transform for Beam's old local runner alone",
    "TestStreamTest.test_basic_execution_with_service": "a TestStream whose events come from a service is refused",
    "TestStreamTest.test_windowed_values_interpreted_correctly": "its elements are not in the windows that the "
    "pipeline says they have; Beam's interactive runner alone makes such a stream",
    "TestStreamTranscriptTest.test_timestamp_combiner_custom_timestamping_earliest_1": "Beam can't translate its "
    "timestamp combiner",
    "TestStreamTranscriptTest.test_known_late_data_watermark": "some elements are late when they are "
    "combined before the grouping, so that the pane's timestamp is the end of the window; broken on Beam's runner, too",
}
# The same transcripts as in TestStreamTranscriptTest, which is stricter; and tests of code that is not ours.
_OTHER_CLASSES = {"WeakTestStreamTranscriptTest", "BatchTranscriptTest", "TriggerDriverTranscriptTest"}


@pytest.fixture(autouse=True)
def our_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    # These tests make pipelines with options of their own, so that the suite's options don't reach them.
    monkeypatch.setattr(StandardOptions, "DEFAULT_RUNNER", "luminosity.LuminosityRunner")


def _is_wanted(test_class: type[unittest.TestCase], test: str) -> bool:
    return test_class.__name__ not in _OTHER_CLASSES


for _module in _MODULES:
    globals().update(taken_over(imported(_module), _is_wanted, _LEFT_OUT))


def test_found() -> None:
    """A class that Beam renames must not empty this suite."""
    assert len(names_of_tests(globals()["test_stream_test_TestStreamTest"])) >= 18
    assert len(names_of_tests(globals()["trigger_test_TestStreamTranscriptTest"])) >= 18
