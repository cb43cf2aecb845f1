"""A Python environment with packages that conflict with those of the tests, or slow them down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def interpreter_with(packages: Sequence[str], variable: str, folder: Path) -> Path:
    """Install the packages into a new environment in ``folder``, and return its interpreter.

    The environment variable ``variable`` may name a folder that has them. If they can't be installed here, the test is
    skipped.
    """
    interpreter = Path(os.environ.get(variable) or folder / "venv") / "bin" / "python"
    if not interpreter.exists():
        subprocess.run([sys.executable, "-m", "venv", interpreter.parents[1]], check=True, timeout=120)
        done = subprocess.run(
            [interpreter, "-m", "pip", "install", "-qq", *packages], capture_output=True, text=True, timeout=1_200
        )
        if done.returncode:
            pytest.skip(f"can't be installed here: {', '.join(packages)}: {done.stderr[-500:]}")
    return interpreter
