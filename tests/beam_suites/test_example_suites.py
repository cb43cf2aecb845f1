"""Beam's own tests of its examples and of the snippets in its documentation, on our runner."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

from luminosity.runner_options import LuminosityOptions
from tests.beam_suites.imported import (
    beam_modules_containing,
    beam_test_pipelines_with,
    imported,
    names_of_tests,
    taken_over,
)
from tests.runners import RUNNER_NAME, beam_test_options

_PACKAGE = "apache_beam.examples."
_GOOGLE = "Google Cloud"
_TENSORFLOW = "tensorflow_transform is not installed"

_MODULES_LEFT_OUT = {
    "complete.autocomplete_it_test": _GOOGLE,
    "complete.estimate_pi_it_test": _GOOGLE,
    "complete.game.game_stats_it_test": _GOOGLE,
    "complete.game.hourly_team_score_it_test": _GOOGLE,
    "complete.game.leader_board_it_test": _GOOGLE,
    "complete.game.user_score_it_test": _GOOGLE,
    "complete.top_wikipedia_sessions_it_test": _GOOGLE,
    "cookbook.bigquery_side_input_it_test": _GOOGLE,
    "cookbook.bigquery_tornadoes_it_test": _GOOGLE,
    "cookbook.bigtableio_it_test": _GOOGLE,
    "cookbook.coders_it_test": _GOOGLE,
    "cookbook.datastore_wordcount_it_test": _GOOGLE,
    "cookbook.group_with_coder_test": _GOOGLE,
    "dataframe.flight_delays_it_test": _GOOGLE,
    "dataframe.taxiride_it_test": _GOOGLE,
    "fastavro_it_test": _GOOGLE,
    "inference.tfx_bsl.tfx_bsl_inference_it_test": "tfx_bsl is not installed",
    "ml_transform.ml_transform_it_test": _TENSORFLOW,
    "ml_transform.mltransform_generate_vocab_test": _TENSORFLOW,
    "ml_transform.mltransform_image_embedding_test": "runs no pipeline",
    "ml_transform.mltransform_one_hot_encoding_test": _TENSORFLOW,
    "ml_transform.mltransform_text_embedding_test": "runs no pipeline",
    "snippets.transforms.elementwise.enrichment_test": "sqlalchemy is not installed",
    "snippets.transforms.elementwise.mltransform_test": _TENSORFLOW,
    "snippets.transforms.elementwise.runinference_test": "PyTorch is not installed",
    "streaming_wordcount_debugging_it_test": _GOOGLE,
    "streaming_wordcount_debugging_test": _GOOGLE,
    "streaming_wordcount_it_test": _GOOGLE,
    "wordcount_it_test": _GOOGLE,
}
_TESTS_LEFT_OUT = {
    "AutocompleteTest.test_autocomplete_it": _GOOGLE,
    "DistribOptimizationTest.test_basics": "mocks scipy in the caller's process",
    "FiltersTest.test_filters_output_bigquery_matcher": _GOOGLE,
    "TypeHintsTest.test_deterministic_key": "adds a class to its module while it runs; workers import that module anew",
}


def _options_of_ours(test: Any) -> None:
    """These tests ask for Beam's Prism runner, and are skipped where there is no Go for it."""
    test.options = PipelineOptions(beam_test_options("--cpu_workers=2").split())


_OVERRIDES: dict[str, dict[str, Any]] = {
    "cookbook.ordered_window_elements.batch_test": {"setUp": _options_of_ours, "__unittest_skip__": False},
}


@pytest.fixture(autouse=True)
def our_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Some tests make a plain Pipeline without any option.
    monkeypatch.setattr(StandardOptions, "DEFAULT_RUNNER", RUNNER_NAME)
    monkeypatch.setitem(LuminosityOptions.defaults, "progress", "off")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with beam_test_pipelines_with(beam_test_options("--cpu_workers=2", f"--temp_location={temporary}")):
        yield


def _test_classes() -> Iterator[tuple[str, type]]:
    for module in beam_modules_containing(""):
        name = module.removeprefix(_PACKAGE)
        if name == module or name in _MODULES_LEFT_OUT:
            continue
        overrides = _OVERRIDES.get(name)
        for test_class in taken_over(imported(module), lambda *_: True, _TESTS_LEFT_OUT, overrides).values():
            if name.startswith("snippets."):
                pytest.mark.slow(test_class)
            # Several examples have tests of the same name.
            yield f"{name.replace('.', '_')}_{test_class.__name__}", test_class


globals().update(_test_classes())


def test_found() -> None:
    """A folder that Beam moves must not empty this suite."""
    classes = [value for value in globals().values() if isinstance(value, type)]
    tests = [test for each in classes if issubclass(each, unittest.TestCase) for test in names_of_tests(each)]
    assert len(tests) >= 240
    assert {_PACKAGE + name for name in _MODULES_LEFT_OUT} <= set(beam_modules_containing(""))
