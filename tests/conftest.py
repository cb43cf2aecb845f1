"""Markers and fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import apache_beam as beam
import pytest

from tests.processes import nothing_left_behind
from tests.runners import run

# Beam's test files carry these; known here so that --strict-markers can be used.
_BEAM_MARKERS = (
    "examples_postcommit",
    "it_postcommit",
    "it_validatesrunner",
    "no_sickbay_batch",
    "no_sickbay_streaming",
    "no_xdist",
    "sickbay_dataflow",
    "sickbay_direct",
    "sickbay_flink",
    "uses_dill",
    "uses_gcp_java_expansion_service",
)


def pytest_configure(config: pytest.Config) -> None:
    for marker in _BEAM_MARKERS:
        config.addinivalue_line("markers", f"{marker}: Beam's own")


@pytest.fixture(scope="session")
def warm_runner() -> None:
    """What lives as long as the process (the fork server) is there before a test looks around."""
    run(lambda pipeline: pipeline | beam.Create([0]), "--cpu_workers=1")


@pytest.fixture
def leaves_nothing(warm_runner: None) -> Iterator[None]:
    """Fail a test whose run leaves files or worker processes behind."""
    with nothing_left_behind():
        yield
