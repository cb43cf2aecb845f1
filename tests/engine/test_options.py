"""Tests of the flags of other runners: they are used if they have a meaning here, and named in a warning otherwise."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity.engine.options import EngineConfig, LuminosityOptions
from luminosity.errors import OptionError


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


def test_workers_import_the_plugins_that_the_script_has_imported() -> None:
    import luminosity.testing.bigquery.for_beam as imported

    seen = config("--beam_plugin=a.module").worker_options["beam_plugins"]
    assert seen[0] == "a.module"
    assert f"{imported.__name__}.LedToFake" in seen
    assert not any(each.startswith("apache_beam.") for each in seen)


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


def test_options_of_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    plain = config(f"--checkpoint_dir={folder}")
    assert (plain.checkpoint_dir, plain.checkpoint_interval, plain.stop_timeout) == (str(folder), None, 30.0)
    assert not folder.exists()
    every = config(
        f"--checkpoint_dir={folder}",
        "--checkpoint_interval=50ms",
        "--stop_timeout=2m",
        '--transform_name_mapping={"a": "b"}',
        "--drop_state=x",
        "--drop_state=y",
    )
    assert (every.checkpoint_interval, every.stop_timeout) == (0.05, 120.0)
    assert (every.renamed_steps, every.drop_state) == ({"a": "b"}, ("x", "y"))


@pytest.mark.parametrize(
    ("text", "seconds"), [("10", 10.0), ("0.05", 0.05), ("10s", 10.0), ("1.5 m", 90.0), ("1H", 3600)]
)
def test_times(text: str, seconds: float, tmp_path: Path) -> None:
    assert config(f"--checkpoint_dir={tmp_path}", f"--checkpoint_interval={text}").checkpoint_interval == seconds


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--checkpoint_dir=gs://bucket/x"], "found a URL, expected a folder on a local or mounted disk"),
        (["--checkpoint_dir=DIR", "--debug"], "--debug and --checkpoint_dir: expected only one of them"),
        (["--checkpoint_dir=DIR", "--spill_dir=DIR"], "--spill_dir and --checkpoint_dir: expected only one"),
        (["--checkpoint_dir=DIR", "--restart", "--drop_state=x"], "--restart and --drop_state: expected only one"),
        (["--checkpoint_dir=DIR", "--checkpoint_interval=1ms"], "expected a time from 10ms up to 1h"),
        (["--checkpoint_dir=DIR", "--checkpoint_interval=soon"], "--checkpoint_interval=soon: expected a time"),
        (["--checkpoint_dir=DIR", "--stop_timeout=-1"], "--stop_timeout=-1: expected a time up to 1h"),
        (
            ["--checkpoint_dir=DIR", "--transform_name_mapping=[1]"],
            "found [1], expected the old and new names of steps",
        ),
        (["--restart", "--drop_state=x"], "--restart, --drop_state: found no --checkpoint_dir, expected one"),
        (["--stop_timeout=3"], "--stop_timeout: found no --checkpoint_dir"),
        (["--checkpoint_interval=3"], "--checkpoint_interval: found no --checkpoint_dir"),
        (
            ["--checkpoint_copy=DIR", "--restore_from=DIR"],
            "--checkpoint_copy, --restore_from: found no --checkpoint_dir",
        ),
        (["--checkpoint_dir=DIR", "--copy_lease=10s"], "--copy_lease=10s: found no --checkpoint_copy, expected one"),
        (["--checkpoint_dir=DIR", "--checkpoint_copy=DIR/copy"], "found a place in --checkpoint_dir="),
        (["--checkpoint_dir=DIR", "--restore_from=DIR"], "found a place in --checkpoint_dir="),
        (["--checkpoint_dir=DIR", "--checkpoint_copy=x", "--copy_lease=0s"], "expected a time from 1s up to 1h"),
        (["--checkpoint_dir=DIR", "--restore_from=x", "--restart"], "--restart and --restore_from: expected only one"),
    ],
)
def test_wrong_options_of_checkpoints(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as error:
        config(*(flag.replace("DIR", str(tmp_path)) for flag in flags))
    assert message in str(error.value)


def test_a_mapping_is_used_only_with_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mapping = '--transform_name_mapping={"a": "b"}'
    config(mapping)
    assert "--transform_name_mapping: no effect here" in caplog.text
    caplog.clear()
    config(mapping, "--update", f"--checkpoint_dir={tmp_path}")
    assert "no effect" not in caplog.text


def test_a_mapping_from_the_command_line_of_lum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transform_name_mapping"
    monkeypatch.setitem(LuminosityOptions.defaults, name, '{"a": "b"}')
    assert config(f"--checkpoint_dir={tmp_path}").renamed_steps == {"a": "b"}
    monkeypatch.setitem(LuminosityOptions.defaults, name, "{a}")
    with pytest.raises(OptionError, match="expected JSON"):
        config(f"--checkpoint_dir={tmp_path}")


def test_the_address_of_a_ray_cluster() -> None:
    assert config().ray_address is None
    given = ["auto", "local", "10.0.0.1:6379", "head.example:6379", "[::1]:6379"]
    assert [config(f"--ray_address={each}").ray_address for each in given] == given


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ray_address=ray://head:10001"], "ray job submit"),
        (["--ray_address=6379"], "expected auto, local, or HOST:PORT"),
        (["--ray_address=head:0"], "expected auto, local, or HOST:PORT"),
        (["--ray_address=head:x"], "expected auto, local, or HOST:PORT"),
        (["--ray_address="], "expected auto, local, or HOST:PORT"),
        (["--ray_address=auto", "--debug"], "--debug and --ray_address"),
        (["--ray_address=auto", "--worker_start=fork"], "--worker_start=fork and --ray_address"),
        (["--ray_address=auto", "--when_busy=wait"], "--when_busy=wait and --ray_address"),
    ],
)
def test_what_a_ray_cluster_can_not_have(flags: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        config(*flags)


def test_packages_are_brought_to_a_ray_cluster(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="luminosity"):
        config("--ray_address=auto", "--setup_file=./setup.py", "--requirements_file=r.txt", "--machine_type=n1")
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("luminosity")]
    assert warning == (
        "--machine_type: no effect here. Workers run on the nodes of a cluster; --cpu_workers and --accelerators "
        "set their number."
    )


def test_workers_are_limited_for_each_pool_or_for_those_with_a_name() -> None:
    found = config("--ray_address=auto", "--max_workers=8", "--max_workers=cpu ram=8GiB=2", "--min_workers=device=1")
    assert (found.max_workers, found.min_workers) == ({"": 8, "cpu ram=8GiB": 2}, {"device": 1})
    assert config("--ray_address=auto", "--idle_timeout=2m").idle_timeout == 120.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max_workers=8",), "--max_workers: found no --ray_address"),
        (("--idle_timeout=8s",), "--idle_timeout: found no --ray_address"),
        (("--ray_address=auto", "--max_workers=0"), "expected a whole number from 1, or POOL=N"),
        (("--ray_address=auto", "--min_workers=device=many"), "expected a whole number from 0, or POOL=N"),
        (("--ray_address=auto", "--min_workers=device=4", "--max_workers=3"), "expected at most 3"),
        (("--ray_address=auto", "--idle_timeout=soon"), "expected a time from 1s"),
    ],
)
def test_wrong_limits_of_pools_say_what_is_expected(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        config(*flags)
