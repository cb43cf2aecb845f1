"""Pub/Sub on this runner, against a server on the loopback: the tests of ``inside/``, in processes with its library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runners import IS_REFERENCE

_INSIDE = Path(__file__).parent / "inside"
_REPOSITORY = Path(__file__).parents[3]
_PACKAGES = Path(sys.prefix) / "pubsub"  # where `make setup` puts Google's client

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(IS_REFERENCE, reason="the pipelines name their runner"),
]


_SLOW = {"examples", "faults"}  # they start many processes, and end some of them
_FILES = sorted({each.stem for each in _INSIDE.glob("*.py")} - {"__init__", "conftest"})


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each in _SLOW else ()) for each in _FILES]
)
def test_all_of(name: str) -> None:
    assert (_PACKAGES / "google" / "pubsub_v1").is_dir(), f"{_PACKAGES} has no packages: run make setup"
    path = os.pathsep.join(map(str, [_REPOSITORY / "src", _REPOSITORY, _PACKAGES]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(_INSIDE / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=_REPOSITORY,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
