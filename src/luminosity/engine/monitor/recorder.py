"""The recorder: a subscriber that keeps one small private file about a run up to date."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from luminosity.engine.monitor import records, requests
from luminosity.events import Event, RunEnded, RunStarted, Snapshot, Subscriber, to_json
from luminosity.manifest import manifest as manifests

__all__ = ["Recorder", "Thinned", "recorder"]


_LOGGER = logging.getLogger(__name__)

_MOST_RUNS = 200  # older records are removed
_FIRST_AFTER_S = 1.0  # a run that is killed early leaves a record of its first second
_MOST_SNAPSHOTS = 200  # keeps a record below about a megabyte
_MOST_HAPPENINGS = 200  # likewise
_UNFINISHED = ".unfinished"
_UNFINISHED_FOR_S = 3600.0  # no write takes this long: its process was killed


def recorder(run_dir: str | None, on_request: Callable[[requests.Action], None] | None = None) -> Subscriber | None:
    """Return a recorder that writes to the folder of ``--run_dir``, or None if runs are not recorded.

    ``on_request`` is called on the thread of the recorder if another process asks the run for something.
    """
    try:
        folder = records.folder(run_dir)
    except RuntimeError as error:
        _warn(error)  # the user has no home folder
        return None
    return None if folder is None else Recorder(folder, on_request)


class Recorder:
    """Writes the events of one run to a file in ``folder``.

    The pipeline's options are not recorded: they may contain secrets. If writing fails, the recorder warns once and
    stops; the run goes on. The recorder also looks for requests of other processes, which lie beside the record.
    """

    def __init__(self, folder: Path, on_request: Callable[[requests.Action], None] | None = None) -> None:
        self._folder = folder
        self._on_request = on_request
        self._requests: requests.RequestFile | None = None
        self._path = folder
        self._content: dict[str, Any] = {}
        self._snapshots = Thinned(_MOST_SNAPSHOTS)
        self._write_at = 0.0
        self._is_broken = False

    def __call__(self, event: Event) -> None:
        if self._is_broken:
            return
        try:
            self._take(event)
            self._look_for_requests(event)
        except OSError as error:
            self._is_broken = True
            _warn(error)

    def _take(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._begin(event)
        elif isinstance(event, Snapshot):
            self._snapshots.add(event)
        elif isinstance(event, RunEnded):
            self._content["ended"] = to_json(event)
        elif len(self._content["happenings"]) < _MOST_HAPPENINGS:
            self._content["happenings"].append(to_json(event))
        else:
            self._content["left_out"] += 1
        if event.seconds >= self._write_at or isinstance(event, RunEnded):
            # Soon at first and seldom later: a run that is killed early leaves a record, a long run writes little.
            self._write_at = event.seconds + min(records.WRITE_EVERY_S, max(_FIRST_AFTER_S, event.seconds))
            self._write()

    def _look_for_requests(self, event: Event) -> None:
        if self._requests is None or self._on_request is None:
            return
        if isinstance(event, RunEnded):
            self._requests.remove()
        elif (action := self._requests.take(event.seconds)) is not None:
            self._on_request(action)

    def _begin(self, event: RunStarted) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _prune(self._folder)
        self._path = records.path_of(self._folder, event.run)
        self._requests = requests.RequestFile(self._folder, event.run)
        self._content = {
            "format": records.FORMAT,
            "process": records.this_process(),
            "started": to_json(event),
            "ended": None,
            "happenings": [],
            "left_out": 0,
        }

    def _write(self) -> None:
        """Replace the file atomically, so that readers always find a complete one."""
        unfinished = f"{self._path}{_UNFINISHED}"
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w") as file:
            file.write(json.dumps({**self._content, "snapshots": self._snapshots.kept}, separators=(",", ":")))
        os.replace(unfinished, self._path)


class Thinned:
    """At most ``most`` snapshots of a run, as JSON, evenly spread over its time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._apart_s = 0.0
        self.kept: list[dict[str, Any]] = []

    def add(self, snapshot: Snapshot) -> None:
        """Keep ``snapshot`` if enough time has passed since the last one; drop every other one when full."""
        if self.kept and snapshot.seconds < self.kept[-1]["seconds"] + self._apart_s:
            return
        if len(self.kept) == self._most:
            del self.kept[1::2]
            spread = self.kept[-1]["seconds"] - self.kept[0]["seconds"]
            self._apart_s = 0.9 * spread / (len(self.kept) - 1)  # snapshots may come a bit early
        self.kept.append(to_json(snapshot))


def _prune(folder: Path) -> None:
    """Remove the oldest records, to make room for one more, and files that a killed run left."""
    requests.remove_old(folder)
    for run_id in records.run_ids(folder)[_MOST_RUNS - 1 :]:
        with contextlib.suppress(FileNotFoundError):  # another run may remove it first
            records.path_of(folder, run_id).unlink()
        manifests.path_of(folder, run_id).unlink(missing_ok=True)
    for path in folder.glob(f"*.json{_UNFINISHED}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _UNFINISHED_FOR_S:
                path.unlink()


def _warn(error: Exception) -> None:
    _LOGGER.warning(
        "this run is not recorded: %s; pass --run_dir=DIR to record runs elsewhere, --run_dir=off to record none", error
    )
