"""Tests of ``lum export dataflow``, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from apache_beam.portability.api import beam_runner_api_pb2

from tests.warm import run_module

pytestmark = pytest.mark.alone

_PIPELINE = """
import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from shop import double

with beam.Pipeline(options=PipelineOptions()) as pipeline:
    numbers = pipeline | "Create" >> beam.Create([1, 2])
    _ = numbers | "Double" >> beam.Map(double).with_resource_hints(min_ram="4GB") | "Print" >> beam.Map(print)
print("the script goes on")
raise FileNotFoundError("results")
"""
_OPTIONS = ("--project=shop-1", "--region=europe-west4", "--temp_location=gs://shop/temp")
_IMAGE = "--sdk_container_image=registry.example/shop"


def lum_export(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_module("luminosity.cli.main", "export", *words, cwd=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pipeline.py").write_text(_PIPELINE)
    (tmp_path / "shop.py").write_text("def double(x):\n    return 2 * x\n")
    return tmp_path


def test_a_job_is_described_and_nothing_is_sent(folder: Path) -> None:
    for _ in range(2):  # the second export replaces the first
        done = lum_export(folder, "dataflow", "pipeline.py", *_OPTIONS, _IMAGE, "--out", "job")
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pipeline.py: the batch job pipeline of Dataflow, ")
    assert "container: registry.example/shop" in done.stdout
    assert ["Double", "min_ram=3.725GiB"] in [line.split() for line in done.stdout.splitlines()]
    assert "Nothing is wrong with it" in done.stdout
    assert "the script goes on" in done.stderr
    assert (
        "after that, the script ended with FileNotFoundError: results (pipeline.py:10). Nothing was run" in done.stderr
    )
    assert sorted(path.name for path in (folder / "job").iterdir()) == ["job.json", "pipeline.pb"]
    job = json.loads((folder / "job" / "job.json").read_text())
    pipeline = beam_runner_api_pb2.Pipeline.FromString((folder / "job" / "pipeline.pb").read_bytes())
    assert job["environment"]["sdkPipelineOptions"]["options"]["pipelineUrl"] == "gs://shop/temp/pipeline/pipeline.pb"
    images = job["environment"]["workerPools"][0]["sdkHarnessContainerImages"]
    assert {each["environmentId"] for each in images} <= set(pipeline.components.environments)


def test_errors_are_said_and_nothing_is_written(folder: Path) -> None:
    done = lum_export(folder, "dataflow", "pipeline.py", "--project=shop-1", "--out", "job")
    assert done.returncode == 3, done.stderr
    assert "found no --region" in done.stdout
    assert "- Double: these steps import shop from this machine, and workers don't have it." in done.stdout
    assert "To fix this: put your folder into an image (lum image FOLDER SOURCES), or pass --setup_file." in done.stdout
    assert not (folder / "job").exists()


def test_wrong_uses_are_refused(folder: Path) -> None:
    (folder / "taken").mkdir()
    (folder / "taken" / "notes.txt").write_text("mine")
    (folder / "empty.py").write_text("")
    (folder / "broken.py").write_text("raise ValueError('no such shop')")
    for words, code, expected in (
        ((), 2, "found no engine, expected dataflow"),
        (("flink", "pipeline.py"), 2, "found 'flink', expected dataflow"),
        (("dataflow",), 2, "found no script"),
        (("dataflow", "none.py"), 2, "none.py: no such file"),
        (("dataflow", "pipeline.py", *_OPTIONS, _IMAGE, "--out", "taken"), 2, "--out taken: found notes.txt"),
        (("dataflow", "empty.py"), 1, "empty.py ran no pipeline"),
        (("dataflow", "broken.py"), 1, "broken.py failed before it ran a pipeline: ValueError: no such shop"),
    ):
        done = lum_export(folder, *words)
        assert done.returncode == code, done.stderr
        assert f"lum export: {expected}" in done.stderr
    assert (folder / "taken" / "notes.txt").read_text() == "mine"
