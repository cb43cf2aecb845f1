"""Beam's own tests of ``BatchElements`` on our runner with two workers: a short input is one bundle.

They name the sizes of all batches, so no bundle may be split.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from typing import Any

import pytest
from apache_beam.testing import test_pipeline

from tests.beam_suites.imported import (
    beam_test_pipelines_with,
    imported,
    keep_bundles_whole,
    names_of_tests,
    taken_over,
)
from tests.runners import beam_test_options

_LEFT_OUT: dict[str, str] = {}
_MODULE = imported("apache_beam.transforms.util_test")


def _our_pipeline(runner: str | None = None, **arguments: Any) -> test_pipeline.TestPipeline:
    """Return a pipeline for the runner under test, whichever runner the test names."""
    return test_pipeline.TestPipeline(**arguments)


@pytest.fixture(autouse=True)
def our_runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_MODULE, "TestPipeline", _our_pipeline)
    keep_bundles_whole(monkeypatch)
    with beam_test_pipelines_with(beam_test_options("--cpu_workers=2")):
        yield


def _is_of_batch_elements(test_class: type[unittest.TestCase], test: str) -> bool:
    return test_class.__name__ == "BatchElementsTest"


globals().update(taken_over(_MODULE, _is_of_batch_elements, _LEFT_OUT))


def test_found() -> None:
    """A class that Beam renames must not empty this suite."""
    assert len(names_of_tests(globals()["util_test_BatchElementsTest"])) >= 33
