"""Continuous integration runs each test that has failed once more, alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SUITE = """
import os, pathlib, pytest

def first_time(name):
    path = pathlib.Path(name)
    is_first = not path.exists()
    path.touch()
    return is_first

def test_good(): pass

@pytest.mark.parametrize("words", ["a b", "c::d[e]/f"])
def test_flaky(words):
    assert not first_time(f"flaky {ord(words[0])}"), "the first failure"
    assert "PYTEST_XDIST_WORKER" not in os.environ

def test_crash():
    if first_time("crashed"):
        os._exit(3)

@pytest.fixture
def late():
    yield
    assert not first_time("late"), "too late"

def test_late(late): pass

def test_bad(): assert False, "always"

@pytest.mark.parametrize("number", range(21))
def test_many(number): assert False, "one of many"
"""


def _again(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Return the exit code, the output and the list of flaky tests."""
    (folder / "test_suite.py").write_text(_SUITE)
    flaky = folder / "flaky.txt"
    found = subprocess.run(
        [sys.executable, "-m", "tests.again", "-p", "no:cacheprovider", *arguments, "test_suite.py"],
        cwd=folder,
        env={
            **{
                name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
            },  # of xdist's worker
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # most of a start is their imports
            "FLAKY_TESTS": str(flaky),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    return found.returncode, found.stdout, flaky.read_text() if flaky.exists() else ""


def test_tests_that_pass_the_second_time_are_printed_with_their_first_failure(tmp_path: Path) -> None:
    code, printed, flaky = _again(tmp_path, "-p", "xdist", "-n2", "-k", "good or flaky or crash or late")
    assert code == 0, printed
    assert "4 failed; they run again, alone" in printed
    assert flaky in printed
    names = sorted(line.partition(": ")[0] for line in flaky.splitlines() if line.startswith("FLAKY"))
    ids = ["test_crash", "test_flaky[a b]", "test_flaky[c::d[e]/f]", "test_late"]
    assert names == [f"FLAKY test_suite.py::{each}" for each in ids]
    for words in ("the first failure", "crashed while running", "too late"):
        assert words in flaky


def test_a_test_that_fails_again_fails_the_run_and_the_flaky_ones_are_still_printed(tmp_path: Path) -> None:
    code, printed, flaky = _again(tmp_path, "-k", "good or flaky or bad")
    assert code == 1
    assert flaky.count("FLAKY") == 2
    assert "FLAKY test_suite.py::test_bad" not in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-k", "good"], 0),
        (["-k", "many"], 1),  # too many
        (["-k", "crash"], 3),  # pytest itself has ended
        (["missing.py"], 4),
    ],
)
def test_otherwise_nothing_runs_again(tmp_path: Path, arguments: list[str], expected: int) -> None:
    code, printed, flaky = _again(tmp_path, *arguments)
    assert (code, flaky) == (expected, "")
    assert "run again" not in printed
