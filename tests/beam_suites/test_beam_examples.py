"""Beam's own examples give the same here as on Beam's local runner."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.examples.complete import estimate_pi

from tests.beam_suites.example_inputs import SERVICES, write_inputs
from tests.beam_suites.example_table import EXAMPLES, LEFT_OUT, Example
from tests.runners import IS_REFERENCE

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="compares our runner with the reference")

_OURS = ["--runner=luminosity.LuminosityRunner", "--progress=off", "--cpu_workers=2"]
# By name, since Beam's DirectRunner may choose another.
_REFERENCE = ["--runner=apache_beam.runners.portability.fn_api_runner.FnApiRunner"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.module)
def test_same_as_on_beams_runner(
    example: Example, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(estimate_pi.EstimatePiTransform.__init__, "__defaults__", (1_000,))  # not ten million trials
    for name, service in {**SERVICES, **example.services}.items():
        monkeypatch.setattr(beam.io, name, service)
    module = import_module(f"apache_beam.examples.{example.module}")
    found: list[Any] = []
    for name, flags in {"reference": _REFERENCE, "ours": _OURS}.items():
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            getattr(module, example.entry)([*example.words(inputs), *flags])
        logged = sorted(r.getMessage() for r in caplog.records if r.filename == Path(str(module.__file__)).name)
        found.append((example.results(folder), logged))
    reference, ours = found
    assert reference[0]
    assert all(reference[0].values())
    assert ours == reference


@pytest.mark.parametrize("module", ["cookbook.group_with_coder", "complete.game.user_score"])
def test_same_as_on_beams_runner_when_run_as_a_script(module: str, inputs: Path, tmp_path: Path) -> None:
    """The example is ``__main__`` then: its classes are no module's that workers could import."""
    example = next(example for example in EXAMPLES if example.module == module)
    script = str(import_module(f"apache_beam.examples.{module}").__file__)
    found: list[Any] = []
    for name, command in {
        "reference": [script, *_REFERENCE],
        "ours": ["-m", "luminosity.cli.main", "run", script],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        words = [sys.executable, *command, *example.words(inputs)]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=140, check=False)
        assert done.returncode == 0, done.stderr
        found.append(example.results(folder))
    reference, ours = found
    assert all(reference.values())
    assert ours == reference


def test_every_example_is_run_or_left_out_for_a_reason() -> None:
    """Those in the folder of snippets have tests of Beam's, which :mod:`test_example_suites` runs."""
    root = Path(beam.__file__).parent / "examples"
    files = [path for path in root.rglob("*.py") if path.name != "__init__.py" and not path.stem.endswith("_test")]
    modules = {".".join(path.relative_to(root).with_suffix("").parts) for path in files}
    run = {example.module for example in EXAMPLES}
    assert not run & LEFT_OUT.keys()
    assert {name for name in modules if not name.startswith("snippets.")} == run | LEFT_OUT.keys()
