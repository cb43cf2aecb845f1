"""Records of runs: their folder, their files and their contents."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from luminosity._shared.text import list_some
from luminosity.core import process_began
from luminosity.errors import RecordError
from luminosity.events import Event, RunEnded, RunStarted, Snapshot, from_json, is_known
from luminosity.runs.journal import NUMBER, Journal, path_beside, with_traceback
from luminosity.runs.thinning import Samples

__all__ = [
    "FORMAT",
    "RUN_ID",
    "UNREADABLE",
    "Damaged",
    "FileVersion",
    "Head",
    "Record",
    "contents",
    "damaged",
    "find",
    "folder",
    "head",
    "is_alive",
    "load",
    "path_of",
    "record_of",
    "run_ids",
    "this_process",
    "version_of",
    "whole_contents",
]


FORMAT = 1  # increases when an older version could not read a record
OFF = "off"
# What reading a record may raise whose fields have other types than expected, or that is nested too deeply.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
_LOST_AFTER_S = 60.0  # a run on another machine that has not written for this long has ended; it writes each second
_HEAD_BYTES = 4096  # a record begins with its process and the names of its pipeline
_MOST_NAMED = 3  # runs, in one line
_E = TypeVar("_E", bound=Event)
RUN_ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")
_FILE = re.compile(rf"({RUN_ID.pattern})\.json")

FileVersion: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Record:
    """A recorded run."""

    started: RunStarted
    happenings: tuple[Event, ...]  # workers, retries, loads, logs and checkpoints: of each kind the first and last ones
    left_out: int  # further events that were not recorded
    # Spread evenly over the run; of the last part of a run under way, one a second. Only the last one is complete.
    snapshots: tuple[Snapshot, ...]
    ended: RunEnded | None
    is_alive: bool  # whether its process still runs; counts only if the run has not ended
    number: int = 0  # of the last event that it holds
    left_out_of: Mapping[str, int] = field(
        default_factory=dict[str, int]
    )  # by kind; empty if an older version wrote it

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


@dataclass(frozen=True)
class Head:
    """What the beginning of a record says."""

    pipeline: tuple[str, str]  # see ``RunStarted.pipeline``
    is_running: bool


def head(path: Path) -> Head | None:
    """Read the beginning of a record, which takes little time. Returns None if an older version wrote it."""
    try:
        with open(path, "rb") as file:
            beginning, mark, _ = file.read(_HEAD_BYTES).partition(b',"started":')
        content = json.loads(beginning + b"}") if mark else {}
        name, of = content["pipeline"]
        # The journal is removed when the run has ended.
        return Head((str(name), str(of)), path_beside(path).exists() and is_alive(content["process"], path))
    except UNREADABLE:
        return None


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


def version_of(path: str | os.PathLike[str]) -> FileVersion | None:
    """Return what changes whenever a file is written or replaced, or None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def load(path: Path, *, only_last: bool = False) -> Record | Damaged:
    """Read a record, and the journal of a run under way.

    Raises nothing: a file that can't be read is returned as :class:`Damaged`. ``only_last`` leaves out all snapshots
    but the last one, which takes less time.
    """
    try:
        record = _read(path, only_last)
        # If the process ended between the reading and the look at the process, the file now says how.
        return record if record.state != "lost" else _read(path, only_last)
    except UNREADABLE as error:
        return damaged(path, error)


def damaged(path: Path, error: Exception) -> Damaged:
    """Return what is said of a record whose reading has raised one of ``UNREADABLE``."""
    is_clear = isinstance(error, (OSError, ValueError))
    return Damaged(path, str(error) if is_clear else f"it does not have the form of a record ({error!r})")


def find(folder: Path, wanted: str, *, only_last: bool = False) -> Record:
    """Return the run whose id starts or ends with ``wanted``, or the newest one for ``last``.

    Raises :class:`RecordError` if there is not exactly one, or if its record can't be read. ``only_last`` is that of
    :func:`load`.
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
    record = load(path_of(folder, found[0]), only_last=only_last)
    if isinstance(record, Damaged):
        raise RecordError(f"{record.path} is damaged: {record.reason}")
    return record


def this_process() -> dict[str, Any]:
    """Return what identifies this process, so that a reader of the record can tell whether it still runs."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid())}


def contents(path: Path, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a record as JSON with ``events``, which were read from its journal before, each event once.

    Raises :class:`RecordError` if another version wrote it. The order of reading matters: a journal is replaced after
    the record has taken its events.
    """
    content = json.loads(path.read_bytes())
    if content["format"] != FORMAT:
        raise RecordError(f"found format {content['format']}, expected {FORMAT}: another version wrote it")
    tracebacks = content.get("tracebacks", {})
    content["happenings"] = [with_traceback(event, tracebacks) for event in content["happenings"]]
    held = content.setdefault("number", 0)
    for event in events:
        if event[NUMBER] <= held:
            continue
        content["number"] = event[NUMBER]
        if event["event"] == "Snapshot":
            content["snapshots"].append(event)
        elif event["event"] == "RunEnded":
            content["ended"] = event
        else:
            content["happenings"].append(event)
    if content["ended"] is None and content["snapshots"]:
        samples = Samples()
        for snapshot in content["snapshots"]:
            samples.note(snapshot)
        content["snapshots"][-1] = samples.fill(content["snapshots"][-1])
    return content


def whole_contents(path: Path) -> dict[str, Any]:
    """Return a record as JSON with the events of its journal. Raises one of ``UNREADABLE``."""
    journal = Journal(path_beside(path))
    try:
        events = journal.read()
    finally:
        journal.close()
    return contents(path, events)


def record_of(content: dict[str, Any], path: Path, *, only_last: bool = False) -> Record:
    """Return the record that :func:`contents` has read."""
    return Record(
        _only(RunStarted, content["started"]),
        tuple(from_json(event) for event in content["happenings"] if is_known(event)),
        content["left_out"],
        tuple(_only(Snapshot, event) for event in content["snapshots"][-1 if only_last else 0 :]),
        None if content["ended"] is None else _only(RunEnded, content["ended"]),
        is_alive(content["process"], path),
        content["number"],
        content.get("left_out_of", {}),
    )


def _read(path: Path, only_last: bool) -> Record:
    return record_of(whole_contents(path), path, only_last=only_last)


def _only(kind: type[_E], data: Any) -> _E:
    event = from_json(data)
    if not isinstance(event, kind):
        raise RecordError(f"found {type(event).__name__}, expected {kind.__name__}")
    return event


def is_alive(process: dict[str, Any], path: Path) -> bool:
    """Return whether the process that writes the record at ``path`` still runs. ``process`` stands in the record."""
    if process["host"] != socket.gethostname():
        return time.time() - _written_at(path) < _LOST_AFTER_S  # several machines may share the folder
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # the pid now belongs to another user's process
    return _began(process["pid"]) == process["began"]


def _written_at(path: Path) -> float:
    times = [path.stat().st_mtime]
    with contextlib.suppress(FileNotFoundError):
        times.append(path_beside(path).stat().st_mtime)
    return max(times)


def _began(pid: int) -> str:
    """Return when a process began, as records have it. Empty if the system does not report it."""
    return str(process_began(pid) or "")
