"""Requests from other processes to a run: one small file beside its record or in its checkpoint folder."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from luminosity._shared.shared_folders import is_own_file

__all__ = ["IN_CHECKPOINT", "Action", "RequestFile", "RequestWatcher", "remove_old", "send"]

Action = Literal["stop", "drain"]

IN_CHECKPOINT = "run"
"""What stands for the id of a run in the name of a request in a checkpoint folder, which belongs to one run."""

_SUFFIX = ".request"
_MOST_BYTES = 16  # a request is one word
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
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, PermissionError):
            return None
        with open(descriptor, "rb") as file:
            if not is_own_file(descriptor):
                return None  # another user, who can write to the folder, must not end the run
            action = file.read(_MOST_BYTES)
        self.remove()
        return "drain" if action == b"drain" else "stop"

    def remove(self) -> None:
        """Remove a request that came too late."""
        with contextlib.suppress(PermissionError):  # of another user, in a folder that several users share
            self._path.unlink(missing_ok=True)


class RequestWatcher:
    """Looks for requests in the checkpoint folder of a run, on a thread of its own: such a run may have no record.

    The owner calls :meth:`close`. Requests to an earlier start are removed.
    """

    def __init__(self, folder: Path, on_request: Callable[[Action], None]) -> None:
        """Call ``on_request`` on the thread of the watcher for each request."""
        self._file = RequestFile(folder, IN_CHECKPOINT)
        self._on_request = on_request
        self._is_closed = threading.Event()
        self._file.remove()
        self._thread = threading.Thread(target=self._run, name="luminosity-requests", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed.wait(_LOOK_EVERY_S):
            try:
                action = self._file.take(float("inf"))
            except OSError:
                continue  # the disk is unavailable now; the checkpoint reports it
            if action is not None:
                self._on_request(action)

    def close(self) -> None:
        """End the thread, and remove a request that came too late."""
        self._is_closed.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # the next start removes it
            self._file.remove()


def remove_old(folder: Path) -> None:
    """Remove requests that no run has taken."""
    for path in folder.glob(f"*{_SUFFIX}*"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # the folder may be shared with other users
            if time.time() - path.stat().st_mtime > _OLD_AFTER_S:
                path.unlink()


def _path_of(folder: Path, run_id: str) -> Path:
    return folder / f"{run_id}{_SUFFIX}"
