"""Tests of the flags of other runners: they are used if they have a meaning here, and named in a warning otherwise."""

from __future__ import annotations

import logging

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity.engine.options import EngineConfig


def config(*flags: str) -> EngineConfig:
    return EngineConfig.of(PipelineOptions(list(flags)))


@pytest.mark.parametrize(
    ("flags", "cpu_workers"),
    [
        ((), None),
        (("--cpu_workers=3",), 3),
        (("--direct_num_workers=3",), 3),
        (("--sdk_worker_parallelism=3",), 3),
        (("--cpu_workers=2", "--sdk_worker_parallelism=3"), 2),
    ],
)
def test_the_number_of_workers(flags: tuple[str, ...], cpu_workers: int | None) -> None:
    assert config(*flags).cpu_workers == cpu_workers


def test_threads_are_bundles_at_once() -> None:
    assert config("--number_of_worker_harness_threads=4").threads_per_worker == 4


def test_workers_see_experiments_and_the_users_own_options() -> None:
    seen = config("--experiments=some_experiment", "--mine=7").worker_options
    assert "some_experiment" in seen["experiments"]
    assert seen["mine"] == "7"


def test_what_means_nothing_here_is_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="luminosity"):
        config("--setup_file=./setup.py", "--requirements_file=r.txt")
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("luminosity")]
    assert "--setup_file, --requirements_file" in warning


def test_without_such_flags_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config("--cpu_workers=1")
    assert [r for r in caplog.records if r.name.startswith("luminosity")] == []
