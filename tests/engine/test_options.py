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
    assert warning == (
        "--requirements_file, --setup_file: no effect here. "
        "Workers run in this Python environment and use the packages installed in it."
    )


@pytest.mark.parametrize(
    "flag",
    [
        "--max_num_workers=5",
        "--machine_type=n1",
        "--disk_size_gb=30",
        "--no_use_public_ips",
        "--template_location=t",
        "--update",
        "--flink_master=f",
        "--parallelism=4",
        "--spark_master_url=s",
        "--job_endpoint=e",
        "--direct_running_mode=multi_processing",
    ],
)
def test_flags_of_clusters_are_named_in_a_warning(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="luminosity"):
        assert config(flag).cpu_workers is None
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("luminosity")]
    name = flag.split("=")[0].replace("--no_", "--")
    assert warning == (
        f"{name}: no effect here. Workers are processes of this machine; --cpu_workers sets their number."
    )


@pytest.mark.parametrize("flag", ["--project=p", "--temp_location=/tmp", "--job_name=j", "--flags_of_mine=1"])
def test_flags_that_beam_or_the_script_reads_are_not(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="luminosity"):
        config(flag)
    assert [r for r in caplog.records if r.name.startswith("luminosity")] == []


def test_without_such_flags_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config("--cpu_workers=1")
    assert [r for r in caplog.records if r.name.startswith("luminosity")] == []
