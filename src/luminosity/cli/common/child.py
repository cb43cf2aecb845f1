"""Runs a command of the user as a process of its own, and ends it if this process is asked to end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from luminosity.runs.manifest.manifest import STARTED_BY

__all__ = ["run_child"]

_END_TIMEOUT_S = 60.0  # a run with a checkpoint stops within 30 s


def run_child(words: Sequence[str], folder: str, mark: str, *, run_dir: str = "", is_quiet: bool = False) -> int:
    """Run a command line, which begins with ``lum``, ``python`` or a program, in ``folder``; return its exit code.

    Its runs carry ``mark`` in their manifests and are recorded in ``run_dir``. If ``is_quiet``, what it prints goes to
    standard error. Raises ``OSError`` if the program can't be started.
    """
    command = os.path.abspath(sys.argv[0])
    lum = [command] if os.path.basename(command) == "lum" and os.path.isfile(command) else ["-m", "luminosity.cli.main"]
    programs = {"lum": [sys.executable, *lum], "python": [sys.executable]}
    process = subprocess.Popen(
        [*programs.get(words[0], [words[0]]), *words[1:]],
        cwd=folder,
        env={**os.environ, STARTED_BY: mark, **({"LUMINOSITY_RUN_DIR": os.path.abspath(run_dir)} if run_dir else {})},
        stdout=sys.stderr.fileno() if is_quiet else None,
    )
    try:
        return process.wait()
    finally:
        if process.poll() is None:  # Ctrl-C or SIGTERM
            process.terminate()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
