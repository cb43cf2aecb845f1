"""Beam's tests of its own RunInference, on our runner: those that run a pipeline.

Slow, and ours takes the same tests in every run. With one worker: many of them count batches and loaded models, or
lean on the order of windows.
"""

from __future__ import annotations

import inspect
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
from apache_beam.ml.inference import base_test
from apache_beam.testing import test_pipeline

from tests.beam_suites.imported import beam_test_pipelines_with, keep_bundles_whole, taken_over
from tests.beam_suites.run_inference_suite import FAILS_AT_RANDOM
from tests.runners import beam_test_options

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

_LEFT_OUT = {
    "RunInferenceBaseTest.test_env_vars_set_correctly": "looks for a worker's variable in the caller",
    "RunInferenceBaseTest.test_increment_failed_batches_counter": "expects ValueError, not StepFailed",
    "RunInferenceBaseTest.test_timing_metrics": "counts batches as if all elements were in one bundle",
    "RunInferenceBaseTest.test_runinference_loads_same_model_with_identifier_multi_process_shared": (
        "counts calls of the model as if all elements were in one bundle"
    ),
    **FAILS_AT_RANDOM,
}


class _OurPipeline(test_pipeline.TestPipeline):
    """Some tests ask for FnApiRunner by name; here they get ours as well."""

    def __init__(self, runner: Any = None, **kwargs: Any) -> None:
        super().__init__(None if runner == "FnApiRunner" else runner, **kwargs)


def _runs_a_pipeline(test_class: type[unittest.TestCase], test: str) -> bool:
    return "TestPipeline(" in inspect.getsource(getattr(test_class, test))


@pytest.fixture(autouse=True)
def our_runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(base_test, "TestPipeline", _OurPipeline)
    keep_bundles_whole(monkeypatch)
    with beam_test_pipelines_with(beam_test_options("--cpu_workers=1")):
        yield


globals().update(taken_over(base_test, _runs_a_pipeline, _LEFT_OUT))
