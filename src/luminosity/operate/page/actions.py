"""What a reader of the page may do to a run: stop it, drain it, save a savepoint. Only to own runs on this machine.

The functions that act are those of ``lum stop``, ``lum drain`` and ``lum checkpoint save``. Each action, also one that
is refused here, becomes a line of the audit file.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from luminosity._shared.text import format_bytes
from luminosity.errors import CheckpointError, LuminosityError, RecordError
from luminosity.operate.page.audit import Audit
from luminosity.runs import records
from luminosity.runs.ending import ask_to_end
from luminosity.runs.records import RUN_ID, Record

__all__ = ["MOST_BYTES", "ActionAsked", "Actions", "Outcome"]

MOST_BYTES = 4_096  # of a request
_ACTIONS = ("stop", "drain", "save")
_FIELDS = {"action", "confirmed", "name"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")  # a name, and never a path


@dataclass(frozen=True)
class ActionAsked:
    """What a request asks for."""

    action: str
    confirmed: str  # the id of the run whose confirmation the reader has seen
    name: str = ""  # of the savepoint

    @classmethod
    def of(cls, body: bytes) -> ActionAsked | None:
        """Return what the body of a request asks for, or None if it has another form."""
        try:
            found: Any = json.loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        fields = cast("dict[str, Any]", found)
        if not {"action", "confirmed"} <= fields.keys() <= _FIELDS:
            return None
        if not all(isinstance(value, str) for value in fields.values()) or fields["action"] not in _ACTIONS:
            return None
        return cls(**fields)


@dataclass(frozen=True)
class Outcome:
    """How an action went: the status of the reply, and a sentence."""

    status: int
    message: str


class Actions:
    """Acts on the runs in a folder of records. Its methods may be called on several threads; they read files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._audit = Audit(folder)
        self._is_saving = threading.Lock()

    def possible(self, run_id: str) -> dict[str, Any]:
        """Return which actions a run takes now, why it takes none, and what was done to it from the page."""
        found = self._own_run(run_id)
        lines = self._audit.lines(run_id)
        if isinstance(found, Outcome):
            return {"actions": [], "why": found.message, "done": lines}
        return {"actions": _ACTIONS if found.started.checkpoint_dir else ("stop",), "why": "", "done": lines}

    def act(self, run_id: str, asked: ActionAsked, user: str = "") -> Outcome:
        """Do what is asked for, and write that down. A savepoint may take minutes, the others are requests.

        ``user`` is who has signed in to a team's page.
        """
        try:
            self._audit.check()
        except OSError as error:
            said = f"found no way to write {self._audit.path.name} ({error}), expected to: what nobody can see later, "
            return Outcome(503, f"{said}the page does not do")
        found = self._own_run(run_id)

        def note(result: str) -> None:
            self._audit.write(run_id[:40], asked.action, result, user=user, name=asked.name, title=_title(found))

        outcome = found if isinstance(found, Outcome) else self._checked(found, asked, note)
        try:
            note(f"{_verdict(outcome)}: {outcome.message}")
        except OSError as error:
            return Outcome(outcome.status, f"{outcome.message}; it is not written down: {error}")
        return outcome

    def _checked(self, record: Record, asked: ActionAsked, note: Callable[[str], None]) -> Outcome:
        run_id = record.started.run
        if asked.confirmed != run_id:
            return Outcome(400, f"found no confirmation of this run, expected its id {run_id} as confirmed")
        try:
            if asked.action == "save":
                return self._save(record, asked.name, note)
            ask_to_end(self._folder, record, "drain" if asked.action == "drain" else "stop")
        except RecordError as error:
            return Outcome(409, str(error))
        except (LuminosityError, OSError) as error:
            return Outcome(500, str(error))
        if asked.action == "drain":
            return Outcome(200, "The run was asked to drain: it reads nothing new and finishes what it has read.")
        if record.started.checkpoint_dir:
            return Outcome(
                200, "The run was asked to stop: it ends when its running bundles have, and keeps a checkpoint."
            )
        return Outcome(200, "The run was asked to end. It has no checkpoint.")

    def _save(self, record: Record, name: str, note: Callable[[str], None]) -> Outcome:
        folder = record.started.checkpoint_dir
        if not folder:
            raise RecordError(
                "found a run without --checkpoint_dir, expected one: a savepoint is a copy of its checkpoint"
            )
        if not _NAME.fullmatch(name):
            return Outcome(400, f"found the name {name[:100]!r}, expected up to 100 letters, digits, '.', '_' and '-'")
        # These import Beam.
        from luminosity.engine.durable.upkeep.saving import save
        from luminosity.runs.run_ids import is_at_work

        if not is_at_work(folder):
            return Outcome(409, f"found no run at work in {folder}, expected this one")
        if not self._is_saving.acquire(blocking=False):
            return Outcome(
                409, "another savepoint is being saved from this page, expected one at a time; try again later"
            )
        try:
            note("begun")  # it may take minutes, and the server may be killed meanwhile
            saved = save(folder, name).savepoint
        except CheckpointError as error:
            return Outcome(409, str(error))
        finally:
            self._is_saving.release()
        whole, own = saved.sizes()
        return Outcome(
            200,
            f"Saved {saved.name}: {format_bytes(whole)}, of which {format_bytes(own)} are new on the disk. Start from "
            f"it with --checkpoint_dir=NEW --savepoint={saved.folder}",
        )

    def _own_run(self, run_id: str) -> Record | Outcome:
        """Return a run that this user may act on: own, on this machine, under way, and really its process."""
        if not RUN_ID.fullmatch(run_id):
            return Outcome(404, f"found no run {run_id[:40]!r}, expected the id of a run")
        path = records.path_of(self._folder, run_id)
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return Outcome(403, f"run {run_id} is recorded by another user, expected a run of your own")
            content = records.whole_contents(path)
            process = content["process"]
            if process["host"] != socket.gethostname():
                return Outcome(409, f"run {run_id} is of the machine {process['host']}, expected one of this machine")
            record = records.record_of(content, path, only_last=True)
            if record.ended is not None:
                return Outcome(409, f"run {run_id} is {record.state}, expected one that runs")
            if not (process["began"] and record.is_alive):  # which compares when the process began
                said = f"process {process['pid']} of run {run_id} has ended; another one may have its number now"
                return Outcome(409, f"{said}, expected a run that runs")
            if os.stat(f"/proc/{process['pid']}").st_uid != os.geteuid():
                return Outcome(403, f"run {run_id} is a process of another user, expected a run of your own")
        except FileNotFoundError:
            return Outcome(404, f"found no run {run_id!r}, expected the id of a run")
        except records.UNREADABLE as error:
            return Outcome(409, f"the record of run {run_id} can't be read: {error}")
        return record


def _verdict(outcome: Outcome) -> str:
    return "done" if outcome.status == 200 else "failed" if outcome.status >= 500 else "refused"


def _title(found: Record | Outcome) -> str:
    return found.started.title if isinstance(found, Record) else ""
