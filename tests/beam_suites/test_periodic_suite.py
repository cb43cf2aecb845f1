"""Beam's own tests of PeriodicImpulse and PeriodicSequence on our runner. Most wait for seconds as their sources do."""

from __future__ import annotations

import unittest

import pytest

from tests.beam_suites.imported import imported, names_of_tests, run_on_our_runner, taken_over
from tests.runners import IS_REFERENCE

pytestmark = [
    pytest.mark.timeout(900),  # two of them run thirty pipelines each
    pytest.mark.skipif(IS_REFERENCE, reason="these are Beam's tests of it"),
]


@pytest.fixture(autouse=True)
def our_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_our_runner(request, monkeypatch, ())


globals().update(taken_over(imported("apache_beam.transforms.periodicsequence_test"), lambda *_: True, {}))


def test_found() -> None:
    """Classes that Beam moves must not empty this suite."""
    classes = [value for value in globals().values() if isinstance(value, type)]
    tests = [test for each in classes if issubclass(each, unittest.TestCase) for test in names_of_tests(each)]
    assert len(tests) >= 27
