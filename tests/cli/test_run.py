"""Tests of ``lum``, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from luminosity.events import RunEnded, RunStarted, Snapshot
from luminosity.runner_options import LuminosityOptions, ModelOptions
from luminosity.runs.recorder import Recorder
from tests.warm import run_module

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


def lum(*arguments: str, run_dir: Path | str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80", **({"LUMINOSITY_RUN_DIR": str(run_dir)} if run_dir else {})}
    return run_module("luminosity.cli.main", *arguments, env=environment)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("def double(x):\n    return 2 * x\n")
    path = tmp_path / "pipeline.py"
    path.write_text(_PIPELINE.format(bad=100, output=str(tmp_path / "out.txt")))
    return path


def test_run_runs_a_script_on_our_runner(script: Path) -> None:
    done = lum("run", str(script), "--cpu_workers=1", "--progress=off")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "runner: LuminosityRunner\n"
    assert done.stderr == ""
    assert sorted((script.parent / "out.txt").read_text().split()) == ["2", "4", "6"]


def test_a_script_sets_up_its_own_logging(tmp_path: Path) -> None:
    (tmp_path / "logs.py").write_text(
        "import logging\nlogging.basicConfig(level=logging.INFO, format='mine %(message)s')\nlogging.info('hello')\n"
    )
    done = lum("run", str(tmp_path / "logs.py"))
    assert (done.returncode, done.stderr) == (0, "mine hello\n")


def test_a_runner_that_is_named_is_used(script: Path) -> None:
    done = lum("run", str(script), "--runner=apache_beam.runners.portability.fn_api_runner.FnApiRunner")
    assert "runner: FnApiRunner" in done.stdout


_ARGUMENTS = """\
import argparse, json, sys
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

parser = argparse.ArgumentParser()
parser.add_argument("table")
parser.add_argument("--mine", type=int)
parser.add_argument("rest", nargs=argparse.REMAINDER)
rest = parser.parse_args().rest
runners = argparse.ArgumentParser()
runners.add_argument("--runner", default="DirectRunner")
chosen = argparse.ArgumentParser()
chosen.add_argument("--runner", choices=["here", "there"], default="here")
known, others = argparse.ArgumentParser().parse_known_args()
print(json.dumps({
    "words": sys.argv[1:],
    "rest": rest,
    "others": others,
    "own": runners.parse_known_args()[0].runner,
    "chosen": chosen.parse_known_args()[0].runner,
    "beam": PipelineOptions(others).view_as(StandardOptions).runner,
}))
"""


@pytest.mark.parametrize("words", [["a", "b"], ["--mine=1", "a"], ["a", "--", "-x"], ["a", "--cpu_workers=2", "b"]])
@pytest.mark.parametrize("command", [["run"], ["plan"], ["export", "dataflow"]], ids=" ".join)
def test_a_script_has_the_words_that_were_typed_and_no_others(
    command: list[str], words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "words.py"
    path.write_text(_ARGUMENTS)
    # Other commands have options of their own: they take the first -- away.
    typed = ["--", *words] if command != ["run"] else words
    done = lum(*command, str(path), *typed)
    found = json.loads((done.stdout if command == ["run"] else done.stderr).splitlines()[0])
    runner = "DataflowRunner" if "dataflow" in command else "luminosity.LuminosityRunner"
    assert found["words"] == words
    rest = [word for word in found["rest"] if word != "--"]  # argparse keeps it or not, by its version
    assert rest == [word for word in words[words.index("a") + 1 :] if word != "--"]
    assert "--runner" not in " ".join(found["others"])
    assert (found["own"], found["beam"], found["chosen"]) == (runner, runner, "here")


def test_a_failing_step_is_told_without_the_runners_own_traceback(script: Path) -> None:
    script.write_text(_PIPELINE.format(bad=4, output=str(script.parent / "out.txt")))
    done = lum("run", str(script))
    assert done.returncode == 1
    assert "step 'Check' failed 4 times: AssertionError: too much" in done.stderr
    assert f"{script}:7" in done.stderr
    assert "element: 4" in done.stderr
    assert "scheduler.py" not in done.stderr
    _, message = done.stderr.split("lum run: ")
    assert message.splitlines() == [
        "step 'Check' failed 4 times: AssertionError: too much",
        f"  at {script}:7",
        "  element: 4",
        "",
        "Traceback (most recent call last):",
        f'  File "{script}", line 7, in check',
        '    assert x != 4, "too much"',
        *([line] if "^" in (line := message.splitlines()[7]) else []),
        "AssertionError: too much",
        "(Frames of Beam and Luminosity are left out; error.traceback has them, and `lum show last --traceback`.)",
    ]


def test_the_whole_traceback_is_in_the_record(script: Path, tmp_path: Path) -> None:
    script.write_text(_PIPELINE.format(bad=4, output=str(script.parent / "out.txt")))
    lum("run", str(script), "--debug", run_dir=tmp_path / "runs")
    shown = lum("show", "last", "--traceback", run_dir=tmp_path / "runs").stdout
    assert shown.startswith("Traceback (most recent call last):")
    assert "apache_beam" in shown
    assert f'File "{script}", line 7, in check' in shown
    assert shown.endswith("AssertionError: too much [while running 'Check']\n")


@pytest.mark.parametrize("command", [["run"], ["plan"], ["export", "dataflow"]], ids=" ".join)
def test_an_exception_of_a_script_is_shown_as_python_shows_it(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("def divide():\n    return 1 / 0\n\ndivide()\n")
    done = lum(*command, str(path))
    assert done.returncode == 1
    assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{path}", line 4, in <module>\n')
    assert "ZeroDivisionError: division by zero\n" in done.stderr
    assert "runpy" not in done.stderr


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_script_that_can_not_be_compiled_is_shown_as_python_shows_it(command: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("print('begin')\nprint((1\n")
    done = lum(command, str(path))
    assert done.returncode == 1
    assert done.stderr.startswith(f'  File "{path}", line 2\n')
    assert "SyntaxError: " in done.stderr


@pytest.mark.parametrize("option", ["--cpu_workrs=2", "--cpu-workers=2"])
def test_a_misspelt_option_is_named_and_left_to_the_script(option: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import sys\nprint(sys.argv[1:])\n")
    done = lum("run", str(path), option, "--workers=2", "--cpu_workers=1")
    assert done.stdout == f"{[option, '--workers=2', '--cpu_workers=1']}\n"
    name = option.removesuffix("=2")
    assert done.stderr == f"lum: {name} is left to the script; did you mean '--cpu_workers'?\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["describ"], "lum: there is no command 'describ'; did you mean 'describe'?\n"),
        (["xyz"], "lum: there is no command 'xyz'; `lum --help` lists the commands\n"),
        (["runs", "--limti=3"], "lum runs: there is no option --limti; did you mean '--limit'?\n"),
        (["runs", "--xyz"], "lum runs: there is no option --xyz; see `lum runs --help`\n"),
        (["show", "last", "4f2a"], "lum show: found '4f2a' after all that the command takes; see `lum show --help`\n"),
        (
            ["drift", "watch", "a.toml", "--xyz"],
            "lum drift watch: there is no option --xyz; see `lum drift watch --help`\n",
        ),
    ],
)
def test_a_wrong_word_is_named_with_the_nearest_right_one(words: list[str], expected: str) -> None:
    done = lum(*words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


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
    assert "--missing_resources" in lum("run", "--help").stdout
    for command in ("runs", "show"):
        assert f"lum {command}" in lum(command, "--help").stdout.partition("examples:")[2]


@pytest.mark.parametrize(
    "command", [(), *((each,) for each in ["run", "plan", "runs", "show", "advise", "replay", "bench", "serve"])]
)
def test_help_fits_a_narrow_terminal(command: tuple[str, ...]) -> None:
    done = lum(*command, "--help")
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []


def test_help_of_export_comes_with_and_without_the_engine() -> None:
    done = lum("export", "dataflow", "--help")
    assert done.returncode == 0
    assert done.stdout == lum("export", "--help").stdout


def test_help_breaks_no_name_at_a_hyphen() -> None:
    assert "classify-images:MODEL" in lum("bench", "--help").stdout


def test_help_of_run_has_all_flags() -> None:
    said = lum("run", "--help").stdout
    for options in (LuminosityOptions, ModelOptions):
        flags = options([]).get_all_options(current_only=True)
        for name in ("checkpoint_run", "restored_run"):  # set by the pipeline itself, not by users
            flags.pop(name, None)
        assert [flag for flag in flags if f"  --{flag}" not in said] == []


def test_pipelines_of_the_same_name_are_listed_with_their_folders(tmp_path: Path) -> None:
    for number, where in enumerate(["/teams/a/jobs", "/teams/b/jobs"]):
        run_id = f"20260101T00000{number}-abcdef"
        write = Recorder(tmp_path)
        write(RunStarted(run_id, 0.0, "pipeline.py", 1.0, (), (), queue_limit=1, folder=where))
        write(RunEnded(run_id, 1.0, "done", Snapshot(run_id, 1.0, (), ())))
    done = lum("runs", f"--run_dir={tmp_path}")
    assert [line.split("\t")[2::4] for line in done.stdout.splitlines()] == [
        ["pipeline.py", "/teams/b/jobs"],
        ["pipeline.py", "/teams/a/jobs"],
    ]
    assert "of /teams/b/jobs/pipeline.py" in lum("show", "last", f"--run_dir={tmp_path}").stdout


def test_runs_are_listed_and_shown(script: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert lum("run", str(script), "--cpu_workers=1", "--progress=off", run_dir=runs).returncode == 0
    script.write_text(_PIPELINE.format(bad=4, output=str(tmp_path / "out.txt")))
    assert lum("run", str(script), "--cpu_workers=1", f"--run_dir={runs}").returncode == 1
    listed = lum("runs", run_dir=runs)
    assert listed.stderr == ""
    newest, oldest = (line.split("\t") for line in listed.stdout.splitlines())
    assert newest[2:4] == ["pipeline.py", "failed"]
    assert newest[5] == f"step 'Check' failed 4 times: AssertionError: too much (at {script}:7)"
    assert oldest[2:4] == ["pipeline.py", "done"]
    assert lum("runs", "--limit=1", run_dir=runs).stdout.splitlines() == listed.stdout.splitlines()[:1]
    shown = lum("show", "last", f"--run_dir={runs}").stdout
    assert f"run {newest[0]}, started {newest[1]}:" in shown
    assert shown.count("step 'Check' failed, attempt ") == 3
    assert "WriteToText (FinalizeWrite)" in shown
    assert "done in" in lum("show", oldest[0][:-1], run_dir=runs).stdout


def test_the_reader_of_the_list_may_close_the_pipe(tmp_path: Path) -> None:
    Recorder(tmp_path)(RunStarted("20260101T000000-abcdef", 0.0, "pipeline.py", 1.0, (), (), queue_limit=1))
    command = f"{sys.executable} -m luminosity.cli.main runs --run_dir={tmp_path} | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=280, check=False)
    assert done.stderr == ""


def test_a_run_that_is_not_recorded(tmp_path: Path) -> None:
    shown = lum("show", "last", run_dir=tmp_path)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == f"lum show: no run is recorded in {tmp_path}\n"
    assert lum("runs", run_dir=tmp_path).stderr == f"No run is recorded in {tmp_path} yet.\n"
    assert "runs are not recorded" in lum("runs", run_dir="off").stderr
    (tmp_path / "file").touch()
    found = lum("runs", run_dir=tmp_path / "file")
    assert (found.returncode, found.stdout) == (2, "")
    assert "found a file, expected the folder of recorded runs; pass --run_dir=DIR" in found.stderr


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    damaged = tmp_path / "20260101T000000-abcdef.json"
    damaged.write_text("{")
    listed = lum("runs", run_dir=tmp_path)
    assert listed.returncode == 0
    assert f"{damaged} is damaged" in listed.stderr
    assert f"{damaged} is damaged" in lum("show", "last", run_dir=tmp_path).stderr
