"""Beam's ValidatesRunner tests, which every runner should pass, on ours with two workers.

They are found by their marker: what a new Beam adds is run without a change here.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator

import pytest
from apache_beam.testing import test_pipeline

from tests.beam_suites.imported import (
    beam_modules_containing,
    beam_test_pipelines_with,
    imported,
    names_of_tests,
    taken_over,
)
from tests.runners import IS_REFERENCE, beam_test_options

_MARKER = "it_validatesrunner"

_MODULES_LEFT_OUT = {
    "apache_beam.runners.dataflow.dataflow_exercise_streaming_metrics_pipeline_test": "Dataflow and Pub/Sub",
}
_TESTS_LEFT_OUT = {
    "PTransformTest.test_group_by_key_importable_special_types_1": "it needs dill 0.3.1.1, and datasets brings a later "
    "one",
    "RunInferenceBaseTest.test_run_inference_with_side_inputin_streaming": "it runs for twenty minutes; see "
    "test_a_new_model_in_a_stream",
}


def _is_marked(test_class: type[unittest.TestCase], test: str) -> bool:
    marks = [*getattr(test_class, "pytestmark", []), *getattr(getattr(test_class, test), "pytestmark", [])]
    return any(mark.name == _MARKER for mark in marks)


@pytest.fixture(autouse=True)
def our_runner() -> Iterator[None]:
    with beam_test_pipelines_with(beam_test_options("--cpu_workers=2")):
        yield


for _module in beam_modules_containing(f"pytest.mark.{_MARKER}"):
    if _module not in _MODULES_LEFT_OUT:
        # Classes that make their own pipelines name Beam's runner there.
        _overrides = {} if IS_REFERENCE else {"create_pipeline": lambda self: test_pipeline.TestPipeline()}
        globals().update(taken_over(imported(_module), _is_marked, _TESTS_LEFT_OUT, _overrides))


def test_found() -> None:
    """A marker that Beam renames must not empty this suite."""
    classes = [value for value in globals().values() if isinstance(value, type)]
    tests = [test for each in classes if issubclass(each, unittest.TestCase) for test in names_of_tests(each)]
    assert len(tests) >= 41
