"""Tests of what a run is called: its job, or its script with the folder of the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions

from luminosity import LuminosityRunner, RunStarted
from luminosity.engine.reporting.run_names import RunName

SHOW = """\
from luminosity.engine.reporting.run_names import RunName

called = RunName.of()
print(called.folder, called.name, sep="|")
"""


def called_by(*words: str, folder: Path, given: str | None = None) -> tuple[str, str]:
    """Return folder and name of a run that Python would start with these words."""
    done = subprocess.run([sys.executable, *words], cwd=folder, input=given, capture_output=True, text=True, check=True)
    where, _, name = done.stdout.strip().partition("|")
    return where, name


def test_a_run_is_called_by_its_script_and_its_folder(tmp_path: Path) -> None:
    jobs, package = tmp_path / "jobs", tmp_path / "jobs" / "etl"
    package.mkdir(parents=True)
    (jobs / "pipeline.py").write_text(f"import os\nos.chdir('/')\n{SHOW}")
    for name in ("__init__", "__main__", "daily"):
        (package / f"{name}.py").write_text("" if name == "__init__" else SHOW)
    assert called_by("jobs/pipeline.py", folder=tmp_path) == (str(jobs), "pipeline.py"), "it changes its folder"
    assert called_by("-m", "etl", folder=jobs) == (str(jobs), "etl")
    assert called_by("-m", "etl.daily", folder=jobs) == (str(package), "daily.py")
    assert called_by("-c", SHOW, folder=jobs) == (str(jobs), "python")
    assert called_by("-", folder=jobs, given=SHOW) == (str(jobs), "python")


def test_a_script_that_lum_run_has_started_is_found_after_it_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here_1.yaml").touch()
    monkeypatch.setattr(sys, "argv", ["only_here_1.yaml"])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert RunName.of() == RunName("only_here_1.yaml", str(tmp_path))


def test_lum_enrich_is_called_by_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    for written, expected in (
        ("/data/a b/out.parquet", RunName("lum enrich out.parquet", "/data/a b")),
        ("out/", RunName("lum enrich out", os.getcwd())),
        ("s3://shop/reviews.parquet", RunName("lum enrich reviews.parquet", "s3://shop")),
    ):
        monkeypatch.setattr(sys, "argv", [RunName.of_enrich(written), "--debug"])
        assert RunName.of() == expected


def test_a_removed_working_folder_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert RunName.of() == RunName("python", "")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("how", ["flag", "view", "command line", ""])
def test_a_job_name_is_the_name_of_the_run(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/jobs/pipeline.py", *(["--job_name=nightly"] if how == "command line" else [])])
    options = PipelineOptions(["--debug", "--run_dir=off", *(["--job_name=nightly"] if how == "flag" else [])])
    if how == "view":
        options.view_as(GoogleCloudOptions).job_name = "nightly"
    started: list[RunStarted] = []
    runner = LuminosityRunner(on_event=lambda event: started.append(event) if isinstance(event, RunStarted) else None)
    with beam.Pipeline(runner=runner, options=options) as pipeline:
        _ = pipeline | beam.Create([1])
    (run,) = started
    assert (run.name, run.folder, run.job) == ("pipeline.py", "/jobs", "nightly" if how else "")
    assert run.pipeline == (("nightly", "") if how else ("pipeline.py", "/jobs"))
    assert run.title == ("nightly" if how else "pipeline.py")
