"""Records of runs: their folder, their files and their contents."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from luminosity._text import list_some
from luminosity.errors import RecordError
from luminosity.events import Event, RunEnded, RunStarted, Snapshot, from_json, is_known

__all__ = [
    "FORMAT",
    "WRITE_EVERY_S",
    "Damaged",
    "Record",
    "find",
    "folder",
    "load",
    "path_of",
    "run_ids",
    "this_process",
]


FORMAT = 1  # increases when an older version could not read a record
OFF = "off"
WRITE_EVERY_S = 10.0  # at most this much of a killed run is lost
_LOST_AFTER_S = 6 * WRITE_EVERY_S  # a run on another machine that has not written for this long has ended
_MOST_NAMED = 3  # runs, in one line
_E = TypeVar("_E", bound=Event)
_FILE = re.compile(r"(\d{8}T\d{6}-[0-9a-f]{6})\.json")


@dataclass(frozen=True)
class Record:
    """A recorded run."""

    started: RunStarted
    happenings: tuple[Event, ...]  # workers started and lost, bundles retried
    left_out: int  # further events that were not recorded
    snapshots: tuple[Snapshot, ...]  # evenly spread over the run
    ended: RunEnded | None
    is_alive: bool  # whether its process still runs; counts only if the run has not ended

    @property
    def state(self) -> str:
        """How the run has ended, or ``running``, or ``lost`` if its process ended without a word.

        A run ends ``done``, ``failed`` or ``cancelled``; with a checkpoint, also ``stopped`` or ``drained``.
        """
        if self.ended is not None:
            return self.ended.state
        return "running" if self.is_alive else "lost"

    @property
    def last(self) -> Snapshot | None:
        """The last snapshot that was recorded."""
        if self.ended is not None:
            return self.ended.last
        return self.snapshots[-1] if self.snapshots else None


@dataclass(frozen=True)
class Damaged:
    """A file in the folder of records that can't be read."""

    path: Path
    reason: str


def folder(given: str | None) -> Path | None:
    """Return the folder of records: ``--run_dir``, ``LUMINOSITY_RUN_DIR`` or a folder in the user's home.

    Returns None if runs are not recorded.
    """
    chosen = given or os.environ.get("LUMINOSITY_RUN_DIR")
    if chosen == OFF:
        return None
    return Path(chosen).expanduser() if chosen else Path.home() / ".luminosity" / "runs"


def run_ids(folder: Path) -> list[str]:
    """Return the ids of the recorded runs, newest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []  # no run was recorded yet
    return sorted((match.group(1) for name in names if (match := _FILE.fullmatch(name))), reverse=True)


def path_of(folder: Path, run_id: str) -> Path:
    """Return the file of a run's record."""
    return folder / f"{run_id}.json"


def load(path: Path) -> Record | Damaged:
    """Read a record. Raises nothing: a file that can't be read is returned as :class:`Damaged`."""
    try:
        record = _read(path)
        # If the process ended between the reading and the look at the process, the file now says how.
        return record if isinstance(record, Damaged) or record.state != "lost" else _read(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Damaged(path, str(error) if isinstance(error, (OSError, ValueError)) else repr(error))


def find(folder: Path, wanted: str) -> Record:
    """Return the run whose id starts or ends with ``wanted``, or the newest one for ``last``.

    Raises :class:`RecordError` if there is not exactly one, or if its record can't be read.
    """
    ids = run_ids(folder)
    found = ids[:1] if wanted == "last" else [i for i in ids if i.startswith(wanted) or i.endswith(wanted)]
    if not ids:
        raise RecordError(f"no run is recorded in {folder}")
    if not found:
        raise RecordError(f"no run {wanted!r} in {folder}", fix="list the recorded runs with `lum runs`")
    if len(found) > 1:
        some = list_some(found, _MOST_NAMED)
        raise RecordError(f"{wanted!r} matches {len(found)} runs ({some}), expected one", fix="give more of the id")
    record = load(path_of(folder, found[0]))
    if isinstance(record, Damaged):
        raise RecordError(f"{record.path} is damaged: {record.reason}")
    return record


def this_process() -> dict[str, Any]:
    """Return what identifies this process, so that a reader of the record can tell whether it still runs."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": _process_began(os.getpid())}


def _read(path: Path) -> Record | Damaged:
    content = json.loads(path.read_text())
    if content["format"] != FORMAT:
        return Damaged(path, f"found format {content['format']}, expected {FORMAT}: another version wrote it")
    return _record(content, path)


def _record(content: dict[str, Any], path: Path) -> Record:
    return Record(
        _only(RunStarted, content["started"]),
        tuple(from_json(event) for event in content["happenings"] if is_known(event)),
        content["left_out"],
        tuple(_only(Snapshot, event) for event in content["snapshots"]),
        None if content["ended"] is None else _only(RunEnded, content["ended"]),
        _is_alive(content["process"], path),
    )


def _only(kind: type[_E], data: Any) -> _E:
    event = from_json(data)
    if not isinstance(event, kind):
        raise RecordError(f"found {type(event).__name__}, expected {kind.__name__}")
    return event


def _is_alive(process: dict[str, Any], path: Path) -> bool:
    if process["host"] != socket.gethostname():
        return time.time() - path.stat().st_mtime < _LOST_AFTER_S  # several machines may share the folder
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # the pid now belongs to another user's process
    return _process_began(process["pid"]) == process["began"]


def _process_began(pid: int) -> str:
    """Return when a process started, in the kernel's unit, to tell it from a later process with the same pid.

    Returns an empty string if the system does not report it.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""
