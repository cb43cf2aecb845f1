"""Marks that user code leaves in files: seen by every process, and not undone when a bundle is tried again.

Kept apart from the tests, so that a worker which unpickles a reference to them imports no more than this.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path


def note(path: Path | str, what: object = "") -> None:
    """Add a line; appends this short never mix."""
    with open(path, "a") as file:
        file.write(f"{what}\n")


def notes(path: Path | str) -> list[str]:
    """The lines so far."""
    return Path(path).read_text().splitlines() if os.path.exists(path) else []


def first_time(path: Path | str) -> bool:
    """True for one caller alone, whatever process it is in."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def wait_for_file(path: Path | str, timeout_s: float = 60) -> None:
    """Hold a worker until the test lets go, but never for ever."""
    deadline = time.monotonic() + timeout_s
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.01)


def meet(path: Path | str, wanted: int, timeout_s: float = 60) -> None:
    """Hold whoever calls until so many threads, of any processes, have called, but never for ever."""
    note(path, f"{os.getpid()} {threading.get_ident()}")
    deadline = time.monotonic() + timeout_s
    while len(set(notes(path))) < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
