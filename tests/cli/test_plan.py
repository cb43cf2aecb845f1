"""Tests of ``lum plan``, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.processes import files_of_runs, wait_for
from tests.warm import run_module

_PIPELINE = """
import sys
import psutil
import apache_beam as beam
from luminosity import LuminosityRunner
from neighbour import double

def leave_a_trace(x):
    open({trace!r}, "w").write("ran")
    return x

if __name__ == "__main__":
    print("the script begins")
    with beam.Pipeline({arguments}) as pipeline:
        numbers = pipeline | beam.Create([1, 2, 3]) | "Double" >> beam.Map(double)
        infer = beam.Map(leave_a_trace).with_resource_hints(accelerator="type:any;count:1")
        numbers | "Infer" >> infer | "Write" >> beam.io.WriteToText({output!r}, shard_name_template="")
    print("processes:", psutil.Process().children(recursive=True))
    {ending}
"""


def lum_plan(*arguments: object, columns: int = 100) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": str(columns)}
    return run_module("luminosity.cli.main", "plan", *map(str, arguments), env=environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("def double(x):\n    return 2 * x\n")
    return tmp_path


def script(folder: Path, arguments: str = "", ending: str = "pass") -> Path:
    path = folder / "pipeline.py"
    places = {"trace": str(folder / "trace"), "output": str(folder / "out.txt")}
    path.write_text(_PIPELINE.format(arguments=arguments, ending=ending, **places))
    return path


@pytest.mark.parametrize("arguments", ["", "runner=LuminosityRunner()"])
def test_the_plan_is_shown_and_nothing_runs(folder: Path, arguments: str) -> None:
    files = files_of_runs()
    done = lum_plan(script(folder, arguments), "--accelerators=2", "--cpu_workers=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pipeline.py: ")
    assert "2 accelerators. Nothing was run." in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines if line[:1] in (["cpu"], ["device"])] == [["cpu", "3"], ["device", "2"]]
    assert "different resources: 'Infer' asks for accelerator=type:any;count:1; 'Double' for nothing" in done.stdout
    assert done.stderr == "the script begins\nprocesses: []\n"
    assert not (folder / "trace").exists()
    assert not (folder / "out.txt").exists()
    assert wait_for(lambda: files_of_runs() <= files, 60)


def test_what_a_run_would_warn_of_is_said(folder: Path) -> None:
    done = lum_plan(script(folder), "--accelerators=0")
    assert done.returncode == 0
    assert "step 'Infer' asks for 1 accelerator(s) of type any; this machine has 0: it runs on the CPU" in done.stderr


def test_a_script_that_misses_its_results_still_gets_its_plan(folder: Path) -> None:
    done = lum_plan(script(folder, ending=f"open({str(folder / 'out.txt')!r})"))
    assert done.returncode == 0
    assert "Breaks" in done.stdout
    assert "lum plan: after that, the script ended with FileNotFoundError: " in done.stderr
    assert "(pipeline.py:19). Nothing was run" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_runner_is_not_used(folder: Path) -> None:
    done = lum_plan(script(folder, arguments="runner='DirectRunner'"))
    assert "lum plan: pipeline.py is meant for DirectRunner; this is how LuminosityRunner would run it" in done.stderr
    assert "Stages" in done.stdout
    assert not (folder / "trace").exists()


def test_drawings_go_to_files_or_to_standard_output(folder: Path) -> None:
    done = lum_plan("--svg", folder / "plan.svg", script(folder), "--dot", "-")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("digraph plan {")
    assert done.stdout.endswith("}\n")
    ElementTree.parse(folder / "plan.svg")


def test_a_script_has_its_own_options(folder: Path) -> None:
    ending = "print(sys.argv[1:])"
    done = lum_plan(script(folder, ending=ending), "--mine", "1", "--all", "--", "--all", "--svg=no file")
    given = "['--mine', '1', '--all', '--svg=no file']"
    assert given in done.stderr
    assert "Write/Write/WriteImpl" in done.stdout


def test_every_pipeline_of_a_script_is_shown(folder: Path) -> None:
    path = folder / "two.py"
    path.write_text(
        "import sys\nimport apache_beam as beam\n"
        "for name in ('One', 'Two'):\n"
        "    with beam.Pipeline() as pipeline:\n"
        "        pipeline | name >> beam.Create([1])\n"
        "sys.exit(0)\n"
    )
    done = lum_plan(path)
    assert done.returncode == 0
    assert "two.py, pipeline 1 of 2" in done.stdout
    assert "two.py, pipeline 2 of 2" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("text", "arguments", "status", "message"),
    [
        ("x = 1", [], 1, "ran no pipeline, expected a script that builds and runs one"),
        ("import sys; sys.exit(3)", [], 3, ""),
        ("import sys; sys.exit('no input')", [], 1, "no input"),
        ("import argparse; argparse.ArgumentParser().parse_known_args()", ["--help"], 0, "usage: script.py"),
        ("raise KeyError('mine')", [], 1, "KeyError: 'mine'"),
        ("raise KeyboardInterrupt", [], 130, "lum plan: interrupted"),
        (
            "import apache_beam as beam\nbeam.Pipeline().run()",
            ["--cpu_workers=many"],
            1,
            "lum plan: --cpu_workers=many: expected a whole number from 1",
        ),
        ("", ["--svg=-", "--dot=-"], 2, "can't both write to standard output"),
        (
            "import apache_beam as beam\nbeam.Pipeline().run()",
            ["--svg=/nowhere/plan.svg"],
            1,
            "lum plan: can't write /nowhere/plan.svg: No such file or directory",
        ),
    ],
)
def test_endings(tmp_path: Path, text: str, arguments: list[str], status: int, message: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(text)
    done = lum_plan(path, *arguments)
    assert done.returncode == status
    assert message in done.stderr
    assert done.stderr.endswith("\n") == bool(message)


def test_a_script_that_is_not_there() -> None:
    done = lum_plan("nowhere.py")
    assert done.returncode == 2
    assert done.stderr == "lum plan: nowhere.py: no such file, expected PIPELINE.py, then options\n"


def test_a_narrow_terminal_is_wide_enough(folder: Path) -> None:
    done = lum_plan(script(folder), columns=50)
    assert max(len(line) for line in done.stdout.splitlines()) <= 50


def test_help_has_examples() -> None:
    assert "lum plan pipeline.py --svg plan.svg" in lum_plan("--help").stdout
