"""Recorded runs: where they are, and what is in them."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from luminosity.errors import RecordError
from luminosity.events import Event, RunEnded, RunStarted, Snapshot, from_json

FORMAT = 1
OFF = "off"
WRITE_EVERY_S = 10.0
_LOST_AFTER_S = 6 * WRITE_EVERY_S
_E = TypeVar("_E", bound=Event)
_FILE = re.compile(r"(\d{8}T\d{6}-[0-9a-f]{6})\.json")


@dataclass(frozen=True)
class Record:
    """A run, as far as it was recorded."""

    started: RunStarted
    happenings: tuple[Event, ...]  # workers started and lost, bundles tried again
    left_out: int  # happenings beyond those
    snapshots: tuple[Snapshot, ...]  # evenly thinned out
    ended: RunEnded | None
    is_alive: bool  # where it has not ended: whether its process still can

    @property
    def state(self) -> str:
        if self.ended is not None:
            return self.ended.state
        return "running" if self.is_alive else "lost"

    @property
    def last(self) -> Snapshot | None:
        """How it stood when it was last seen."""
        if self.ended is not None:
            return self.ended.last
        return self.snapshots[-1] if self.snapshots else None


@dataclass(frozen=True)
class Damaged:
    """A file in a record's place that is none."""

    path: Path
    reason: str


def folder(given: str | None) -> Path | None:
    """Where runs are recorded: as ``--run_dir`` or the environment says, else in the user's home. None: nowhere."""
    chosen = given or os.environ.get("LUMINOSITY_RUN_DIR")
    if chosen == OFF:
        return None
    return Path(chosen).expanduser() if chosen else Path.home() / ".luminosity" / "runs"


def run_ids(folder: Path) -> list[str]:
    """The newest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []  # no run was recorded yet
    return sorted((match.group(1) for name in names if (match := _FILE.fullmatch(name))), reverse=True)


def path_of(folder: Path, run_id: str) -> Path:
    return folder / f"{run_id}.json"


def load(path: Path) -> Record | Damaged:
    try:
        record = _read(path)
        # Its process may have ended after it was read and before it was looked for: now its last word is there.
        return record if isinstance(record, Damaged) or record.state != "lost" else _read(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Damaged(path, str(error) if isinstance(error, (OSError, ValueError)) else repr(error))


def find(folder: Path, wanted: str) -> Record:
    """The run whose id begins or ends with ``wanted``, or the newest where that is ``last``."""
    ids = run_ids(folder)
    found = ids[:1] if wanted == "last" else [i for i in ids if i.startswith(wanted) or i.endswith(wanted)]
    if not ids:
        raise RecordError(f"no run is recorded in {folder}")
    if not found:
        raise RecordError(f"no run {wanted!r} in {folder}; `lum runs` lists those that are there")
    if len(found) > 1:
        some = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise RecordError(f"{wanted!r} fits {len(found)} runs ({some}); expected more of an id")
    record = load(path_of(folder, found[0]))
    if isinstance(record, Damaged):
        raise RecordError(f"{record.path} is damaged: {record.reason}")
    return record


def this_process() -> dict[str, Any]:
    """What tells later whether it is this process that still lives."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": _process_began(os.getpid())}


def _read(path: Path) -> Record | Damaged:
    content = json.loads(path.read_text())
    if content["format"] != FORMAT:
        return Damaged(path, f"format {content['format']}, expected {FORMAT}: written by another version")
    return _record(content, path)


def _record(content: dict[str, Any], path: Path) -> Record:
    return Record(
        _only(RunStarted, content["started"]),
        tuple(from_json(event) for event in content["happenings"]),
        content["left_out"],
        tuple(_only(Snapshot, event) for event in content["snapshots"]),
        None if content["ended"] is None else _only(RunEnded, content["ended"]),
        _is_alive(content["process"], path),
    )


def _only(kind: type[_E], data: Any) -> _E:
    event = from_json(data)
    if not isinstance(event, kind):
        raise ValueError(f"found {type(event).__name__}, expected {kind.__name__}")
    return event


def _is_alive(process: dict[str, Any], path: Path) -> bool:
    if process["host"] != socket.gethostname():
        return time.time() - path.stat().st_mtime < _LOST_AFTER_S  # a folder that several machines share
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # the number is somebody else's by now
    return _process_began(process["pid"]) == process["began"]


def _process_began(pid: int) -> str:
    """In the kernel's own unit, to tell a process from a later one with its number; empty where it does not say."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""
