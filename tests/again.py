"""Runs pytest, and once more each test that has failed, alone: ``python -m tests.again``, with the arguments of pytest.

A test that passes the second time is flaky. It is printed with its first failure, and does not fail the run, so that
one flaky test does not hold up a change. ``FLAKY_TESTS`` may name a file that gets the same lines.

This module is also the plugin of pytest that notes which tests have failed; the option ``--failures`` names its file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

_MOST = 20  # tests that run again: if more fail, the change is to blame
_SHOWN_LINES = 15  # of a first failure
_FAILED = 1  # pytest's exit code if tests have failed, and all went well otherwise


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", type=Path, help="write the ids of failed tests and their failures to this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.failures is not None and not hasattr(config, "workerinput"):  # xdist's workers report to us
        config.pluginmanager.register(_Notes(config.option.failures))


class _Notes:
    """Notes failed tests, also those whose process has crashed, and files that can't be collected."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failures: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self._failures.setdefault(report.nodeid, report.longreprtext)

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._failures))


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 if each test has passed, be it the second time."""
    code, failures = _run(arguments)
    tests = [each for each in failures if "::" in each]
    if code != _FAILED or len(tests) != len(failures) or len(tests) > _MOST:
        return code
    print(f"\n{len(tests)} failed; they run again, alone", flush=True)
    code, again = _run(tests)
    if code not in (0, _FAILED):
        return code
    flaky = "".join(_describe(each, failures[each]) for each in tests if each not in again)
    print(flaky, end="", flush=True)
    if path := os.environ.get("FLAKY_TESTS"):
        with open(path, "a") as file:
            file.write(flaky)
    return code


def _run(arguments: Sequence[str]) -> tuple[int, dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "failures.json")
        command = [sys.executable, "-m", "pytest", "-p", __spec__.name, f"--failures={path}", *arguments]
        code = subprocess.run(command, check=False).returncode
        return code, json.loads(path.read_text()) if path.exists() else {}


def _describe(test: str, failure: str) -> str:
    lines = [f"    {line}\n" for line in failure.splitlines()[-_SHOWN_LINES:]]
    return "".join([f"FLAKY {test}: failed once, passed alone. Mend it before the next change.\n", *lines])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
