"""Tests of ``lum run project.toml``."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from luminosity.cli.rerun.project import run_project
from luminosity.runs.manifest.places import Place

_COPY = """\
import sys
text = open(sys.argv[1]).read()
open(sys.argv[2], "w").write(text + "!")
open("log", "a").write(sys.argv[2] + " ")
"""
_PROJECT = """\
[[step]]
name = "first"
command = "python copy.py raw.txt build/first.txt"
inputs = ["raw.txt"]
outputs = ["build/first.txt"]

[[step]]
name = "second"
command = ["python", "copy.py", "build/first.txt", "build/second.txt"]
inputs = ["build/first.txt"]
outputs = ["build/second.txt"]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy.py").write_text(_COPY)
    (tmp_path / "raw.txt").write_text("raw")
    path = tmp_path / "project.toml"
    path.write_text(_PROJECT)
    return path


def ran(project: Path, *options: str, code: int = 0) -> list[str]:
    """Run the project, and return the outputs of the steps that ran."""
    (project.parent / "log").write_text("")
    assert run_project(str(project), list(options)) == code
    return (project.parent / "log").read_text().split()


def test_only_what_is_not_up_to_date_runs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = project.parent
    both = ["build/first.txt", "build/second.txt"]
    assert ran(project, "--dry-run") == []
    assert ran(project) == both
    assert (folder / "build/second.txt").read_text() == "raw!!"
    assert ran(project) == []
    os.utime(folder / "raw.txt", (1, 1))  # the content counts, not the time
    assert ran(project) == []
    (folder / "raw.txt").write_text("new")
    capsys.readouterr()
    assert ran(project, "--dry-run") == []
    told = capsys.readouterr().out
    assert "step first: would run, input raw.txt has changed" in told
    assert "step second: would run, its input build/first.txt will be made anew" in told
    assert ran(project) == both
    (folder / "build/second.txt").unlink()
    assert ran(project) == both[1:]
    (folder / "build/second.txt").write_text("by hand")
    assert ran(project) == both[1:]
    project.write_text(_PROJECT.replace('"build/first.txt", "build/second.txt"]', '"raw.txt", "build/second.txt"]', 1))
    assert ran(project) == both[1:]
    (folder / "copy.py").write_text(_COPY + "\n")
    assert ran(project) == both
    assert ran(project, "--force") == both
    assert ran(project, "--force", "--from", "second") == both[1:]


def test_the_first_failure_ends_the_project_and_keeps_what_is_done(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(project) == ["build/first.txt", "build/second.txt"]
    good = project.read_text()
    project.write_text(good.replace('"python", "copy.py", "build/first.txt"', '"python", "copy.py", "nosuch.txt"'))
    assert ran(project, code=1) == []
    assert "step 'second' (" in (told := capsys.readouterr().err)
    assert "project.toml:7) has failed with exit code 1" in told
    assert (project.parent / "build/second.txt").read_text() == "raw!!"
    project.write_text(good)
    assert ran(project) == ["build/second.txt"]  # it is not known to be right any more
    project.write_text(good.replace('outputs = ["build/second.txt"]', 'outputs = ["build/other.txt"]'))
    assert ran(project, code=1) == ["build/second.txt"]
    assert "has not written its output build/other.txt" in capsys.readouterr().err
    project.write_text(good.replace('["python", "copy.py", "build', '["nosuchprogram", "copy.py", "build'))
    assert ran(project, code=1) == []
    assert "nosuchprogram can't be started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "second"', 'name = "first"', "project.toml:7: there is a step 'first' in line 1 already"),
        (
            'inputs = ["raw.txt"]',
            'inputs = ["row.txt"]',
            "project.toml:1: step 'first' reads row.txt, which does not exist",
        ),
        ('inputs = ["raw.txt"]', 'inputs = ["build/second.txt"]', "which step 'second' in line 7 makes later"),
        ('inputs = ["raw.txt"]', 'inputs = ["build/first.txt"]', "step 'first' reads its own output"),
        (
            'outputs = ["build/second.txt"]',
            'outputs = ["build/first.txt"]',
            "project.toml:7: step 'second' writes build/first.txt",
        ),
        ('outputs = ["build/second.txt"]', 'outputs = ["build"]', "which step 'first' in line 1 writes, too"),
        ('outputs = ["build/second.txt"]', 'output = ["build/second.txt"]', "project.toml:11: unknown key 'output'"),
        ('outputs = ["build/second.txt"]', 'outputs = "build/second.txt"', "project.toml:11: outputs: found"),
        ('name = "first"\n', "", "project.toml:1: found name=None"),
        ('name = "first"\n', 'name = "first"\nrun = "copy.py"\n', "found both or none of run and command"),
        ('name = "first"', 'name = "first', "expected TOML"),
        (_PROJECT, "", "found no step"),
        (_PROJECT, "[steps]\n", "project.toml:1: unknown table or key 'steps'; did you mean 'step'?"),
    ],
)
def test_mistakes_are_named_with_their_line_before_anything_runs(
    project: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    assert old in _PROJECT
    project.write_text(_PROJECT.replace(old, new, 1))
    assert ran(project, code=2) == []
    assert message in capsys.readouterr().err


def test_unknown_steps_and_options_are_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(project, "--from", "secund", code=2) == []
    assert "did you mean 'second'?" in capsys.readouterr().err
    assert ran(project, "--cpu_workers=1", code=2) == []
    assert "a project file takes --force, --from STEP and --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("declared", "was_read", "is_named"),
    [
        ("../test.csv", "{top}/test.csv", True),
        ("./in.csv", "{top}/project/in.csv", True),
        ("{top}/project/in.csv", "{top}/project/in.csv", True),
        ("file://{top}/test.csv", "{top}/test.csv", True),
        ("~/test.csv", "{top}/test.csv", True),
        ("link.csv", "{top}/test.csv", True),
        ("../test.csv", "{top}/project/link.csv", True),
        ("linked", "{top}/data/a.csv", True),
        ("../data/*.csv", "{top}/data/a.csv", True),
        ("../data/*.csv", "{top}/project/../data/*.csv", True),
        ("../data", "{top}/data/?.csv", True),
        ("../data/a.csv", "{top}/data/*.csv", False),
        ("in.csv", "{top}/test.csv", False),
        ("../test.csv", "{top}/test.csv2", False),
    ],
)
def test_files_that_the_project_file_does_not_name(
    declared: str,
    was_read: str,
    is_named: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "project"
    for file in (tmp_path / "test.csv", folder / "in.csv", tmp_path / "data/a.csv", tmp_path / "data/b.csv"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("a\n1\n")
    (folder / "link.csv").symlink_to(tmp_path / "test.csv")
    (folder / "linked").symlink_to(tmp_path / "data")
    (folder / "project.toml").write_text(
        f'[[step]]\nname = "one"\ncommand = "true"\ninputs = ["{declared.format(top=tmp_path)}"]\n'
    )
    path = was_read.format(top=tmp_path)
    run = SimpleNamespace(inputs=[Place("Read", path)], outputs=[], code={}, models=())
    monkeypatch.setattr("luminosity.cli.rerun.project._runs", lambda mark: [run])
    assert run_project(str(folder / "project.toml"), []) == 0
    told = f"has read {path}, which inputs in project.toml:1 does not name" in capsys.readouterr().err
    assert told is not is_named


def test_a_path_is_the_same_in_every_spelling_and_addresses_are_refused(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = f"{project.parent}/build/../build/first.txt"
    project.write_text(_PROJECT.replace('inputs = ["build/first.txt"]', f'inputs = ["{again}"]'))
    assert ran(project) == ["build/first.txt", "build/second.txt"]
    assert ran(project) == []
    project.write_text(_PROJECT.replace('inputs = ["raw.txt"]', 'inputs = ["gs://bucket/raw.txt"]'))
    assert ran(project, code=2) == []
    assert (
        "project.toml:4: inputs: found gs://bucket/raw.txt, expected a path of this machine" in capsys.readouterr().err
    )
