"""Tests of scripts whose models live in another process: with Beam's model manager, or shared by Beam or by us."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import files_of_runs, wait_for
from tests.runners import IS_REFERENCE

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
]

_SCRIPT = """
import os
import sys

import apache_beam as beam
from apache_beam.ml.inference import base
from apache_beam.options.pipeline_options import PipelineOptions

import luminosity
from luminosity import LuminosityRunner


class Model:
    def __init__(self, factor):
        if factor == 0:
            raise ValueError("no factor")  # the line of the load
        self.factor = factor

    def times(self, number):
        if number == 13:
            raise ValueError("unlucky")  # the line of the model
        return number * self.factor, os.getpid()


class BeamHandler(base.ModelHandler):
    def __init__(self, factor, is_shared):
        super().__init__()
        self.factor = factor
        self.is_shared = is_shared

    def load_model(self):
        return Model(self.factor)

    def run_inference(self, batch, model, inference_args=None):
        return [(number, model.times(number), os.getpid()) for number in batch]

    def share_model_across_processes(self):
        return self.is_shared


class OurHandler(luminosity.Handler):
    def __init__(self, factor):
        super().__init__(large_model=True)
        self.factor = factor

    def load_model(self):
        return Model(self.factor)

    def predict(self, model, batch, inference_args=None):
        return [(number, model.times(number), 0) for number in batch]


def infer(kind, factor):
    if kind == "manager":
        return base.RunInference(BeamHandler(factor, False), use_model_manager=True)
    if kind == "shared":
        return base.RunInference(BeamHandler(factor, True))
    return luminosity.RunInference(OurHandler(factor)) | beam.Map(lambda result: result.inference)


def as_line(result):
    number, (product, of_model), of_worker = result
    return f"{number} {product} {of_model != of_worker}"


if __name__ == "__main__":
    kind, factor, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with beam.Pipeline(runner=LuminosityRunner(), options=PipelineOptions(sys.argv[4:])) as pipeline:
        numbers = pipeline | beam.Create(range(most)) | beam.Reshuffle()
        lines = numbers | "Infer" >> infer(kind, factor) | beam.Map(as_line)
        lines | beam.io.WriteToText("out.txt", shard_name_template="")
"""


def run_script(
    folder: Path, kind: str, *, factor: int = 3, most: int = 10, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(_SCRIPT)
    words = [sys.executable, str(script), kind, str(factor), str(most), "--progress=off", "--cpu_workers=2", *flags]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=280, check=False)


def line_of(words: str) -> int:
    return 1 + next(i for i, line in enumerate(_SCRIPT.splitlines()) if words in line)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("manager", ()),
        pytest.param("manager", ("--worker_start=spawn",), marks=pytest.mark.slow),
        ("shared", ()),
        ("ours", ()),
    ],
)
def test_classes_of_a_script_reach_the_process_of_the_model(kind: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    before = files_of_runs()
    done = run_script(tmp_path, kind, flags=flags)
    assert done.returncode == 0, done.stderr
    # Beam's manager warns that it finds no nvidia-smi.
    said = [line for line in done.stderr.splitlines() if "apitools" not in line and "nvidia-smi" not in line]
    assert said == []
    lines = [line.split() for line in (tmp_path / "out.txt").read_text().splitlines()]
    assert sorted((int(number), int(product)) for number, product, _ in lines) == [(n, 3 * n) for n in range(10)]
    if kind == "manager":
        assert {elsewhere for *_, elsewhere in lines} == {"True"}
    if kind != "ours":  # the folder of shared hosts stays
        assert wait_for(lambda: files_of_runs() <= before, timeout_s=60)


@pytest.mark.parametrize("kind", ["manager", "shared", "ours"])
def test_an_error_in_a_shared_model_names_the_line(kind: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, kind, most=14)
    assert done.returncode != 0
    assert "ValueError: unlucky" in done.stderr
    assert f"at {tmp_path}/script.py:{line_of('the line of the model')}" in done.stderr
    assert re.search(r"element: (one of a batch of \d+|.*\b13\b)", done.stderr)


@pytest.mark.parametrize(
    "kind",
    ["manager", pytest.param("shared", marks=pytest.mark.slow), pytest.param("ours", marks=pytest.mark.slow)],
)
def test_an_error_while_a_shared_model_is_loaded_names_the_line(kind: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, kind, factor=0)
    assert done.returncode != 0
    assert "ValueError: no factor" in done.stderr
    assert f"at {tmp_path}/script.py:{line_of('the line of the load')}" in done.stderr
