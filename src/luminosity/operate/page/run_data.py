"""The recorded runs as JSON: a line about each run, and all of one run. Files that have not changed are read once."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from luminosity.engine.monitor import records
from luminosity.engine.monitor.records import Damaged, Record
from luminosity.events import BundleRetried, LogMessage, to_json
from luminosity.operate.page.replies import Packed, json_bytes

__all__ = ["RUN_ID", "Run", "RunFiles", "number_of"]

RUN_ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")
_MOST_SUMMARIES = 1_000  # a folder keeps 200 runs
_MOST_RUNS = 8  # whole runs that are kept, each up to 10 MB with its packed form

_Version = tuple[int, int, int]
V = TypeVar("V")


class Run:
    """One run, ready to be sent."""

    def __init__(self, record: Record) -> None:
        self.state = record.state
        self.number = number_of(record)
        self.content = Packed(json_bytes(_whole(record, self.number)))


class RunFiles:
    """The folder of records. Its methods may be called on several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._summaries: _Cache[dict[str, Any] | Damaged] = _Cache(_MOST_SUMMARIES)
        self._runs: _Cache[Run | Damaged] = _Cache(_MOST_RUNS)

    def list(self) -> Packed:
        """Return all runs, the newest first, with a line about each."""
        found = [self._summaries.get(self._path(run_id), _summary) for run_id in records.run_ids(self.folder)]
        lines = [each for each in found if isinstance(each, dict)]
        damaged = [{"file": each.path.name, "reason": each.reason} for each in found if isinstance(each, Damaged)]
        return Packed(json_bytes({"folder": str(self.folder), "runs": lines, "damaged": damaged}))

    def run(self, run_id: str) -> Run | Damaged | None:
        """Return one run, or None if it is not recorded."""
        return self._runs.get(self._path(run_id), _run)

    def _path(self, run_id: str) -> Path:
        assert RUN_ID.fullmatch(run_id)
        return records.path_of(self.folder, run_id)


def number_of(record: Record) -> int:
    """Return the number of the last event in a record."""
    last = record.ended or record.last or record.started
    return int(1000 * max([last.seconds, *(event.seconds for event in record.happenings)]))


def _run(path: Path) -> tuple[Run | Damaged, bool]:
    record = records.load(path)
    return (record, True) if isinstance(record, Damaged) else (Run(record), record.state != "running")


def _whole(record: Record, number: int) -> dict[str, Any]:
    return {
        "id": record.started.run,
        "state": record.state,
        "number": number,
        "started": to_json(record.started),
        "ended": None if record.ended is None else to_json(record.ended),
        "happenings": [to_json(event) for event in record.happenings],
        "left_out": record.left_out,
        "snapshots": [to_json(snapshot) for snapshot in record.snapshots],
        "cost": None,
    }


def _summary(path: Path) -> tuple[dict[str, Any] | Damaged, bool]:
    """Return the line about a run, and whether it stays true as long as the file does not change."""
    record = records.load(path)
    if isinstance(record, Damaged):
        return record, True
    last = record.last
    stages = {stage.id: stage for stage in last.stages} if last is not None else {}
    line = {
        "id": record.started.run,
        "name": record.started.name,
        "state": record.state,
        "started_at": record.started.started_at,
        "seconds": last.seconds if last is not None else 0.0,
        "elements": max((view.elements for view in stages.values()), default=0),
        "rate": max((view.rate for view in stages.values()), default=0.0) if record.state == "running" else 0.0,
        "seconds_left": last.seconds_left if last is not None and record.state == "running" else None,
        "failure": record.ended.failure if record.ended is not None else "",
        "is_stream": any(stage.is_stream for stage in record.started.stages),
        "retries": sum(isinstance(event, BundleRetried) for event in record.happenings),
        "warnings": sum(event.count for event in record.happenings if isinstance(event, LogMessage)),
        "cost": None,
    }
    return line, record.state != "running"


class _Cache(Generic[V]):
    """What was made from files, by their version, up to a number of them; the one unused for longest goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._held: OrderedDict[Path, tuple[_Version, V]] = OrderedDict()

    def get(self, path: Path, make: Callable[[Path], tuple[V, bool]]) -> V | None:
        """Return what ``make`` returns for a file, or None if there is no file.

        ``make`` also returns whether its result may be used until the file changes.
        """
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return None
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        with self._lock:
            held = self._held.get(path)
            if held is not None and held[0] == version:
                self._held.move_to_end(path)
                return held[1]
        value, is_lasting = make(path)
        with self._lock:
            self._held.pop(path, None)
            if is_lasting:
                self._held[path] = (version, value)
            while len(self._held) > self._most:
                self._held.popitem(last=False)
        return value
