"""Beam's own tests of streams on our runner: TestStream, triggers, windows, state and timers, unbounded sources."""

from __future__ import annotations

import unittest

import pytest

from tests.beam_suites.imported import imported, names_of_tests, run_on_our_runner, taken_over
from tests.runners import IS_REFERENCE

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(IS_REFERENCE, reason="Beam's local runner has no TestStream"),
]

_MODULES = (
    "apache_beam.io.unbounded_source_test",
    "apache_beam.testing.test_stream_test",
    "apache_beam.transforms.deduplicate_test",
    "apache_beam.transforms.trigger_test",
    "apache_beam.transforms.userstate_test",
    "apache_beam.transforms.window_test",
)
_TRANSLATED = "Beam can't translate its timestamp combiner"
_LEFT_OUT = {
    "ReverseTestStreamTest": "needs PairWithTiming, a primitive that only Beam's old local runner has",
    "TestStreamTest.test_windowed_values_interpreted_correctly": "its elements are not in the windows that the "
    "pipeline says they have; Beam's interactive runner alone makes such a stream",
    "TestStreamTranscriptTest.test_timestamp_combiner_custom_timestamping_earliest_1": _TRANSLATED,
    "WeakTestStreamTranscriptTest.test_timestamp_combiner_custom_timestamping_earliest_1": _TRANSLATED,
}
# Tests of Beam's own code, which run no pipeline or run it on Beam's local runner.
_OTHER_CLASSES = {"BatchTranscriptTest", "TriggerDriverTranscriptTest"}
# The transcripts of TestStreamTranscriptTest, checked less strictly: once in worker processes is enough.
_IN_DEBUG_MODE = {"WeakTestStreamTranscriptTest"}


@pytest.fixture(autouse=True)
def our_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_our_runner(request, monkeypatch, _IN_DEBUG_MODE)


def _is_wanted(test_class: type[unittest.TestCase], test: str) -> bool:
    return test_class.__name__ not in _OTHER_CLASSES


for _module in _MODULES:
    globals().update(taken_over(imported(_module), _is_wanted, _LEFT_OUT))


def test_found() -> None:
    """Classes that Beam moves must not empty this suite."""
    classes = [value for value in globals().values() if isinstance(value, type)]
    tests = [test for each in classes if issubclass(each, unittest.TestCase) for test in names_of_tests(each)]
    assert len(tests) >= 210
