"""Tests of manifests and of ``lum rerun``, run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.warm import run_module

_PIPELINE = """
import argparse
import pickle
import apache_beam as beam
import numpy as np
from apache_beam.ml.inference.base import ModelHandler
from luminosity import Column, Enrich, Handler, ReadTable, WriteTable
import pyarrow as pa
from neighbour import label

class Adder(Handler):
    def __init__(self, path):
        self.path = path
    @property
    def model_id(self):
        return self.path
    def load_model(self):
        return int(open(self.path).read())
    def predict(self, model, batch, inference_args=None):
        return [n + model for n in batch]

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--table")
    parser.add_argument("--model")
    parser.add_argument("--out")
    parser.add_argument("--token")
    parsed, _ = parser.parse_known_args()
    with beam.Pipeline() as pipeline:
        table = pipeline | "Read" >> ReadTable(parsed.table)
        table = table | "Add" >> Enrich(sum=Column(Adder(parsed.model), "n", pa.int64()))
        table | "Write" >> WriteTable(parsed.out + "/sums", if_exists="replace")
        lines = table | beam.FlatMap(lambda batch: [label(n) for n in batch["sum"].to_pylist()])
        lines | "Text" >> beam.io.WriteToText(parsed.out + "/lines", file_name_suffix=".txt")
"""


def lum(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80", "LUMINOSITY_RUN_DIR": str(folder / "runs")}
    return run_module("luminosity.cli.main", *words, cwd=folder, env=environment)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("def label(n):\n    return f'n={n}'\n")
    (tmp_path / "pipeline.py").write_text(_PIPELINE)
    (tmp_path / "in.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(50)))
    (tmp_path / "model.txt").write_text("7")
    return tmp_path


def run(folder: Path) -> dict[str, Any]:
    """Run the pipeline, and return its manifest."""
    words = ("--table=in.csv", "--model=model.txt", "--out=out", "--cpu_workers=1", "--progress=off", "--token=abc")
    done = lum(folder, "run", "pipeline.py", *words)
    assert done.returncode == 0, done.stderr
    shown = lum(folder, "show", "last", "--manifest")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


def test_a_rerun_names_what_has_changed_and_compares_the_outputs(project: Path) -> None:
    manifest = run(project)
    before = {path: path.read_bytes() for path in (project / "out").rglob("*") if path.is_file()}

    assert manifest["state"] == "done"
    assert manifest["command"][:3] == ["lum", "run", "pipeline.py"]
    assert "--token=***" in manifest["command"]
    assert "abc" not in json.dumps(manifest["command"])
    assert {str(project / name) for name in ("pipeline.py", "neighbour.py")} <= {*manifest["code"]}
    assert [(each["step"], os.path.basename(each["path"])) for each in manifest["inputs"]] == [("Read", "in.csv")]
    assert [os.path.basename(each["path"]) for each in manifest["models"]] == ["model.txt"]
    assert {each["step"]: each["rows"] for each in manifest["outputs"]} == {"Write": 50, "Text": 50}
    assert manifest["unknown"] == []
    assert manifest["packages"]["apache-beam"].startswith("2.")

    refused = lum(project, "rerun", "last")
    assert refused.returncode == 2
    assert "--token" in refused.stderr
    assert "secrets are not recorded" in refused.stderr

    same = lum(project, "rerun", "last", "--into=again", "--json", "--", "--token=abc")
    assert same.returncode == 0, same.stderr + same.stdout
    result = json.loads(same.stdout)
    assert result["same"]
    assert result["changes"] == []
    assert {each["step"]: each["verdict"] in ("same bytes", "same content") for each in result["outputs"]} == {
        "Write": True,
        "Text": True,
    }
    assert (project / "again" / "out" / "sums").is_dir()
    assert "abc" not in same.stderr

    (project / "model.txt").write_text("8")
    with (project / "in.csv").open("a") as file:
        file.write("50\n")
    path = project / "runs" / f"{manifest['run']}.manifest.json"
    path.write_text(json.dumps({**manifest, "packages": {**manifest["packages"], "numpy": "0.1"}}))
    checked = lum(project, "rerun", manifest["run"], "--check")
    assert checked.returncode == 3
    for words in (
        "package numpy: was 0.1, is ",
        f"input {project / 'in.csv'}: was ",
        f"model {project / 'model.txt'}: was ",
    ):
        assert words in checked.stdout

    other = lum(project, "rerun", manifest["run"], "--into=other", "--", "--token=abc")
    assert other.returncode == 3, other.stderr
    assert "51 rows" in other.stdout
    assert "50 rows before" in other.stdout
    assert "DIFFERENT: 0 of 2 outputs are equal" in other.stdout
    assert {path: path.read_bytes() for path in before} == before


def test_what_can_not_be_done_again_is_refused(project: Path) -> None:
    none = lum(project, "rerun", "last")
    assert none.returncode == 2
    assert "no run is recorded" in none.stderr
    manifest = run(project)
    path = project / "runs" / f"{manifest['run']}.manifest.json"

    def refusal(*words: str, **changes: Any) -> str:
        path.write_text(json.dumps({**manifest, "command": manifest["command"][:-1], **changes}))
        done = lum(project, "rerun", "last", *words)
        assert done.returncode == 2, done.stdout
        return done.stderr

    assert "only a run that is done" in refusal(state="failed")
    assert "is not complete" in refusal(state="running")
    assert "ran in a notebook" in refusal(command=[])
    assert "which is gone" in refusal(folder=str(project / "gone"))
    assert "nothing to compare" in refusal(outputs=[])
    elsewhere = [{**manifest["outputs"][0], "path": str(project / "fixed.parquet")}]
    assert "add --overwrite" in refusal(outputs=elsewhere)
    assert "expected a new or empty folder" in refusal("--into=out")
    path.write_text("{")
    assert "can't be read" in lum(project, "rerun", "last").stderr
    path.unlink()
    assert "has no manifest" in lum(project, "rerun", "last").stderr
