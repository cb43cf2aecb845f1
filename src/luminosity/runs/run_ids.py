"""The identity of a run: new for each start, or kept in its checkpoint folder if the run has one.

A run with ``--checkpoint_dir`` that is killed and started again continues with elements of the first start. These name
temporary files and folders, so the steps of both starts must agree on names. Names are drawn when the pipeline is
built; the engine writes the identity into the checkpoint in the transaction with which a new run begins there. So what
is saved always belongs to the identity beside it, and a pipeline that is built but never runs changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import sqlite3
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity._shared.shared_files import try_lock, unlock

__all__ = [
    "AT_INTERVALS",
    "META_KEY",
    "CheckpointedRun",
    "RunIdentity",
    "is_at_work",
    "machine_name",
    "new_id",
    "run_identity",
    "run_to_store",
]

META_KEY = "sinks"
"""The key of the identity in the table ``meta`` of a checkpoint."""

AT_INTERVALS = "StableAtIntervals"
"""The label of a Reshuffle whose readers rather get much at once than soon: it never makes a checkpoint come early."""

_BUSY_S = 5.0  # how long the engine may keep the database from readers: it does for moments only
_LOCK = "lock"  # that the engine holds while the run is at work
_DATABASE = "checkpoint.sqlite"
_SAVED_AT = "saved_at"  # in ``meta``, once a checkpoint was saved
_NAME = re.compile(r"c(?P<machine>[0-9a-f]{6})-r(?P<id>[0-9a-f]{12})(?![0-9a-f])")
_LINK = "checkpoint"


@dataclass(frozen=True)
class CheckpointedRun:
    """A run with a checkpoint folder. Several processes work on it, one after the other.

    Its text is a part of the names of the run's temporary folders. These contain a link to the checkpoint folder, so
    that other runs can tell whether the run is at work, may be continued, or is over.

    >>> run = CheckpointedRun("0a1b2c", "0123456789ab")
    >>> CheckpointedRun.in_name(f".luminosity-write-{run}-table-1") == run
    True
    """

    machine: str  # on which it was started first
    id: str

    @classmethod
    def in_name(cls, name: str) -> CheckpointedRun | None:
        """Return the run that a name contains, or None if it contains none."""
        found = _NAME.search(name)
        return cls(found["machine"], found["id"]) if found else None

    def mark(self, folder: str, checkpoint_dir: str) -> None:
        """Put the link to the checkpoint folder into a temporary folder. May be repeated."""
        with contextlib.suppress(FileExistsError):
            os.symlink(os.path.abspath(checkpoint_dir), os.path.join(folder, _LINK))

    def is_alive(self, folder: str) -> bool | None:
        """Return whether the run whose temporary folder this is works right now.

        False: it is over, and nothing needs the folder. None: it may be continued, or this machine can't tell.
        """
        try:
            checkpoint_dir = os.readlink(os.path.join(folder, _LINK))
        except OSError:
            return None
        if self.machine != machine_name():
            return None
        try:
            if _stored(checkpoint_dir) != str(self):
                return False
        except sqlite3.Error:
            return None
        return True if is_at_work(checkpoint_dir) else None

    def describe(self) -> str:
        """Return the run in words."""
        return "a run with a checkpoint"

    def __str__(self) -> str:
        return f"c{self.machine}-r{self.id}"


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a pipeline's run, for the steps that are about to be built.

    Without a checkpoint folder, ``run`` is None, and names are to be drawn anew.
    """

    run: CheckpointedRun | None = None
    checkpoint_dir: str = ""
    is_resumed: bool = False
    """Whether the folder has a checkpoint already: the run continues, so its own output may exist."""
    _names: Counter[str] = field(default_factory=Counter[str], repr=False, compare=False)

    @property
    def is_durable(self) -> bool:
        """Whether the run has a checkpoint folder."""
        return self.run is not None

    def number(self, place: str) -> int:
        """Return how many steps before this one write to the same place: each needs temporary names that differ."""
        self._names[place] += 1
        return self._names[place] - 1

    def stable(self, elements: Any, label: str = "Stable") -> Any:
        """Return a PCollection with the same elements that a step with effects outside the pipeline may rely on.

        If such a step is repeated after a restart, it gets the same elements again: behind a Reshuffle, a run with a
        checkpoint passes on only elements that are in the checkpoint.
        """
        return elements | label >> beam.Reshuffle() if self.is_durable else elements


_identities: weakref.WeakKeyDictionary[beam.Pipeline, RunIdentity] = weakref.WeakKeyDictionary()


def run_identity(pipeline: beam.Pipeline) -> RunIdentity:
    """Return the identity of the run that a pipeline is built for. Call it when a transform is expanded."""
    found = _identities.get(pipeline)
    if found is None:
        found = _identities[pipeline] = _new_identity(pipeline)
    return found


def run_to_store(options: PipelineOptions) -> str:
    """Return the identity that the steps of a pipeline have, for the engine to store if a new run begins."""
    from luminosity.runner_options import LuminosityOptions

    ours: Any = options.view_as(LuminosityOptions)
    return ours.checkpoint_run or str(_drawn())


def new_id() -> str:
    """Return twelve random hexadecimal digits."""
    return uuid4().hex[:12]


def machine_name() -> str:
    """Return a short name of the machine; containers of one machine count as several, as their ids differ."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:6]


def _new_identity(pipeline: beam.Pipeline) -> RunIdentity:
    # Other runners have no checkpoint folder, and our flags may mean something else there.
    if not type(pipeline.runner).__module__.startswith("luminosity."):
        return RunIdentity()
    from luminosity.runner_options import LuminosityOptions

    options: Any = pipeline.options.view_as(LuminosityOptions)
    if not options.checkpoint_dir:
        return RunIdentity()
    folder = os.path.abspath(os.path.expanduser(options.checkpoint_dir))
    stored = None
    if not options.restart:
        with contextlib.suppress(sqlite3.Error):  # The engine opens the checkpoint soon, and explains what is wrong.
            stored = CheckpointedRun.in_name(options.restored_run or _identity_in(folder, options.savepoint) or "")
    run = stored or _drawn()
    options.checkpoint_run = str(run)  # The engine stores it if a new run begins.
    return RunIdentity(run, folder, is_resumed=stored is not None)


def _drawn() -> CheckpointedRun:
    return CheckpointedRun(machine_name(), new_id())


def _identity_in(checkpoint_dir: str, savepoint: str | None) -> str | None:
    """Return the identity of the run that continues in a folder, which may begin with a savepoint."""
    if not savepoint:
        return _stored(checkpoint_dir)
    of_savepoint = _stored(os.path.abspath(os.path.expanduser(savepoint)), "mode=ro&immutable=1")
    return _stored(checkpoint_dir, if_saved=True) or of_savepoint


def _stored(checkpoint_dir: str, mode: str = "mode=ro", *, if_saved: bool = False) -> str | None:
    """Return the identity of the run that has begun in a checkpoint folder, or None. Raises ``sqlite3.Error``.

    With ``if_saved``, it has saved a checkpoint, too.
    """
    path = os.path.join(checkpoint_dir, _DATABASE)
    if not os.path.exists(path):
        return None
    with contextlib.closing(sqlite3.connect(f"file:{quote(path)}?{mode}", uri=True, timeout=_BUSY_S)) as database:
        found = dict(database.execute("SELECT key, value FROM meta WHERE key IN (?, ?)", (META_KEY, _SAVED_AT)))
    return str(found[META_KEY]) if META_KEY in found and (_SAVED_AT in found or not if_saved) else None


def is_at_work(checkpoint_dir: str) -> bool:
    """Return whether a process works on the checkpoint in this folder."""
    try:
        descriptor = os.open(os.path.join(checkpoint_dir, _LOCK), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not try_lock(descriptor, shared=True):
            return True
        unlock(descriptor)
        return False
    finally:
        os.close(descriptor)
