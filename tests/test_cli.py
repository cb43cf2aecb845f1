"""The command, as a person runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

_PIPELINE = """
import sys
import apache_beam as beam
from neighbour import double

def check(x):
    assert x != {bad}, "too much"
    return x

if __name__ == "__main__":
    with beam.Pipeline() as pipeline:
        numbers = pipeline | beam.Create([1, 2, 3]) | beam.Map(double) | "Check" >> beam.Map(check)
        numbers | beam.io.WriteToText({output!r}, shard_name_template="")
    print("runner:", type(pipeline.runner).__name__)
"""


def lum(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "luminosity.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("def double(x):\n    return 2 * x\n")
    path = tmp_path / "pipeline.py"
    path.write_text(_PIPELINE.format(bad=100, output=str(tmp_path / "out.txt")))
    return path


def test_run_runs_a_script_on_our_runner(script: Path) -> None:
    done = lum("run", str(script), "--cpu_workers=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "runner: LuminosityRunner\n"
    assert done.stderr == ""
    assert sorted((script.parent / "out.txt").read_text().split()) == ["2", "4", "6"]


def test_a_runner_that_is_named_is_used(script: Path) -> None:
    done = lum("run", str(script), "--runner=apache_beam.runners.portability.fn_api_runner.FnApiRunner")
    assert "runner: FnApiRunner" in done.stdout


def test_a_failing_step_is_told_without_the_runners_own_traceback(script: Path) -> None:
    script.write_text(_PIPELINE.format(bad=4, output=str(script.parent / "out.txt")))
    done = lum("run", str(script))
    assert done.returncode == 1
    assert "step 'Check' failed 4 times: AssertionError: too much" in done.stderr
    assert f"{script}:7" in done.stderr
    assert "element: 4" in done.stderr
    assert "scheduler.py" not in done.stderr


def test_a_bad_option_is_refused(script: Path) -> None:
    done = lum("run", str(script), "--cpu_workers=many")
    assert done.returncode == 1
    assert done.stderr == "lum run: --cpu_workers=many: expected a whole number from 1\n"


def test_a_script_that_is_not_there() -> None:
    done = lum("run", "nowhere.py")
    assert done.returncode == 2
    assert "nowhere.py: no such file" in done.stderr


def test_help_has_examples() -> None:
    assert "examples:" in lum("--help").stdout
    assert "--missing_accelerator" in lum("run", "--help").stdout
