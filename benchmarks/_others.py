"""Environments of the programs that we compare with. Each gets its own, so that it has the versions that it wants."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PLACE = Path(tempfile.gettempdir()) / "quick-predictions"

_INSTALL_S = 900


def python_with(*requirements: str) -> str:
    """Return the Python of an environment with these packages, which is made once."""
    folder = PLACE / re.sub(r"\[\w+\]", "", f"others-{'-'.join(requirements)}")
    python = str(folder / "bin" / "python")
    if not (folder / "ready").exists():
        print(f"Installing {', '.join(requirements)}: once, about a minute", file=sys.stderr)
        PLACE.mkdir(exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, *requirements], check=True, timeout=_INSTALL_S)
        (folder / "ready").touch()
    return python
