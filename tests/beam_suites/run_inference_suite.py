"""Beam's tests of RunInference with ours in its place, for the modules that run them on one runner each."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pytest
from apache_beam.ml.inference import base, base_test
from apache_beam.testing import test_pipeline

from luminosity import RunInference
from tests.beam_suites.imported import beam_test_pipelines_with, keep_bundles_whole, taken_over
from tests.beam_suites.shared_fakes import FakeModelHandler, FakeModelHandlerReturnsPredictionResult

FAILS_AT_RANDOM = {
    "ModelManagerTest.test_run_inference_impl_with_model_manager_oom": (
        "its model fails at random, and the test expects that trying again does not help"
    ),
}

# Why each test that is left out can't hold here, on any runner.
DIFFERENT_BY_DESIGN = {
    "RunInferenceBaseTest.test_timing_metrics": "counts batches as Beam's BatchElements would cut them",
    "RunInferenceBaseTest.test_run_inference_impl_with_keyed_examples_many_mhs_max_models_hint": (
        "wants models loaded again and again; one batch for each needs one load"
    ),
    "RunInferenceBaseTest.test_run_inference_watch_file_pattern_side_input_label": (
        "looks for the side input on the last step; here it is on the one before"
    ),
    "RunInferenceBaseTest.test_run_inference_watch_file_pattern_keyword_arg_side_input_label": (
        "looks for the side input on the last step; here it is on the one before"
    ),
    "ModelManagerTest.test_run_inference_impl_with_model_manager_args": "settings of Beam's model manager are refused",
    **FAILS_AT_RANDOM,
}


def suite(left_out: Mapping[str, str], slow: Collection[str] = ()) -> dict[str, type[unittest.TestCase]]:
    return taken_over(base_test, lambda _class, _test: True, {**DIFFERENT_BY_DESIGN, **left_out}, slow=slow)


def our_transform_on(runner_name: str, options: str) -> Callable[[pytest.MonkeyPatch], Iterator[None]]:
    """A fixture: within it Beam's tests use our RunInference, on this runner even where they name another."""

    class Pipeline(test_pipeline.TestPipeline):
        def __init__(self, runner: Any = None, **kwargs: Any) -> None:
            super().__init__(None if runner == "FnApiRunner" else runner, **kwargs)

    @pytest.fixture(autouse=True)
    def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(base_test, "TestPipeline", Pipeline)
        monkeypatch.setattr(base, "RunInference", RunInference)
        keep_bundles_whole(monkeypatch)
        for fake in (FakeModelHandler, FakeModelHandlerReturnsPredictionResult):
            monkeypatch.setattr(base_test, fake.__name__, fake)
        with beam_test_pipelines_with(options):
            yield

    return ours
