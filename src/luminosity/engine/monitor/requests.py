"""Requests from other processes to a run: one small file beside the run's record, at which the run looks."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Literal

__all__ = ["Action", "RequestFile", "remove_old", "send"]

Action = Literal["stop", "drain"]

_SUFFIX = ".request"
_LOOK_EVERY_S = 1.0  # how late a run notices a request, at most
_OLD_AFTER_S = 3600.0  # a request that no run has taken by then is of a run that has ended


def send(folder: Path, run_id: str, action: Action) -> None:
    """Ask a run to do something. Replaces a request that the run has not seen yet. Does not wait."""
    path = _path_of(folder, run_id)
    unfinished = f"{path}.{os.getpid()}"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        file.write(action)
    os.replace(unfinished, path)


class RequestFile:
    """The requests to one run. The run looks for them, on any one thread."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._path = _path_of(folder, run_id)
        self._look_at = 0.0

    def take(self, seconds: float) -> Action | None:
        """Return the request that has arrived, if there is one. Looks only if a second has passed since the last time.

        ``seconds`` is any clock that goes on, such as the time of events.
        """
        if seconds < self._look_at:
            return None
        self._look_at = seconds + _LOOK_EVERY_S
        try:
            action = self._path.read_text()
        except FileNotFoundError:
            return None
        self.remove()
        return "drain" if action == "drain" else "stop"

    def remove(self) -> None:
        """Remove a request that came too late."""
        self._path.unlink(missing_ok=True)


def remove_old(folder: Path) -> None:
    """Remove requests that no run has taken."""
    for path in folder.glob(f"*{_SUFFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _OLD_AFTER_S:
                path.unlink()


def _path_of(folder: Path, run_id: str) -> Path:
    return folder / f"{run_id}{_SUFFIX}"
