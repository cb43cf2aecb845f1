"""Earlier states of a checkpoint, kept beside it for the case that it is damaged, and how one is put back.

A kept state is a folder below ``kept`` with the number of its last transaction as its name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from luminosity._shared.shared_files import sync_file
from luminosity._shared.text import format_bytes
from luminosity.engine.data.world import Clock
from luminosity.engine.durable import tables
from luminosity.engine.durable.place import DATABASE, snapshot, unchanged
from luminosity.engine.durable.synced_log import sync_files
from luminosity.engine.durable.tables import KEPT, NUMBER
from luminosity.engine.durable.upkeep.states import copy_rows, damage_of_state, link, locked, put_back
from luminosity.errors import CheckpointDamaged, CheckpointError

__all__ = ["KeptStates", "Restored", "damage_of_kept", "kept_times", "restore_last"]

_LOGGER = logging.getLogger(__name__)

_EVERY_S = 600.0  # between two states that are kept: as much work is lost at most if a checkpoint is damaged
_LARGEST_SHARE = 0.01  # of the time, for keeping states: one that took long is kept less often
_LEAST_FREE = 2.0  # times the size of a state: with less room on the disk, none is kept
_NEW = "new"  # a state that is not complete


@dataclass(frozen=True)
class Restored:
    """A state that was put back."""

    number: int  # of its last transaction
    kept_at: float  # seconds since 1970
    passed_over: list[str]  # newer states, with what is damaged in them


class KeptStates:
    """The kept states of one checkpoint folder, whose lock this process has. One thread at a time may use it."""

    def __init__(
        self, folder: str, most: int, every_s: float = _EVERY_S, largest_share: float = _LARGEST_SHARE
    ) -> None:
        """Keep up to ``most`` states, and wait ``every_s`` seconds or longer from one to the next.

        It takes up to ``largest_share`` of the time.
        """
        self._folder = folder
        self._place = os.path.join(folder, KEPT)
        self._most = most
        self._every_s = every_s
        self._largest_share = largest_share
        self._next_at: float | None = None

    def is_due(self, now: float, *, at_start: bool = False) -> bool:
        """Return whether it is time to keep another state. At the start of a run, also if there is none yet.

        ``now`` is in seconds since 1970.
        """
        if not self._most:
            return False
        if self._next_at is None:
            newest = max((at for _, at in _states(self._folder)), default=0.0 if at_start else now)
            self._next_at = newest + self._every_s
        return now >= self._next_at

    def postpone(self, until: float) -> None:
        """Keep no state before a time."""
        self._next_at = until

    def keep(self, rows: sqlite3.Connection, clock: Clock) -> None:
        """Keep the state of a database whose log is written back, and of which everything is synced.

        Raises :class:`CheckpointDamaged` if the database is damaged: it is not kept then.
        """
        began_at, now = clock.monotonic(), clock.time()
        self.postpone(now + self._every_s)
        database = os.path.join(self._folder, DATABASE)
        files = tables.files_of(rows, database)
        size = os.path.getsize(database) + sum(os.path.getsize(os.path.join(self._folder, path)) for path in files)
        free = shutil.disk_usage(self._folder).free
        if free < _LEAST_FREE * size:
            _LOGGER.warning("no earlier state of %s is kept: %s are free", self._folder, format_bytes(free))
            return
        new = os.path.join(self._place, _NEW)
        shutil.rmtree(new, ignore_errors=True)
        os.makedirs(new, mode=0o700)
        try:
            copy = os.path.join(new, DATABASE)
            with snapshot(database) as seen:  # A connection of its own has nothing in memory yet.
                copy_rows(seen, copy)
            with unchanged(copy) as state:
                for problem in tables.damage_of_rows(state, database, 0):
                    raise problem
                number = int(tables.stored_meta(state, copy)[NUMBER])
            for path in files:
                link(os.path.join(self._folder, path), os.path.join(new, path))
            sync_files([copy, *(os.path.join(new, path) for path in files)])
            shutil.rmtree(state_folder := os.path.join(self._place, f"{number:012d}"), ignore_errors=True)
            os.rename(new, state_folder)
            sync_file(self._place)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        for path, _ in _states(self._folder)[self._most :]:
            shutil.rmtree(path, ignore_errors=True)
        self.postpone(now + max(self._every_s, (clock.monotonic() - began_at) / self._largest_share))

    def remove_all(self) -> None:
        """Remove all kept states: the run has finished."""
        shutil.rmtree(self._place, ignore_errors=True)


def kept_times(folder: str) -> list[float]:
    """Return when the states beside a checkpoint were kept, in seconds since 1970, the newest first."""
    return [at for _, at in _states(folder)]


def damage_of_kept(folder: str) -> Iterator[CheckpointDamaged]:
    """Yield what is damaged in the kept states of a checkpoint."""
    for path, _ in _states(folder):
        if (problem := _damage_of(path)) is not None and os.path.isdir(path):  # A run may remove it meanwhile.
            yield problem


def restore_last(folder: str) -> Restored:
    """Put back the newest kept state that is not damaged, in place of the checkpoint in a folder.

    Raises :class:`CheckpointError` if there is none, or if a run uses the folder; then nothing is changed.
    """
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such folder, expected one that --checkpoint_dir of a run names")
    with locked(folder):
        passed_over: list[str] = []
        for path, kept_at in _states(folder):
            if (problem := _damage_of(path)) is None:
                return Restored(put_back(folder, path, {}), kept_at, passed_over)
            passed_over.append(problem.message)
    found = (
        "; ".join(["found no kept state that is not damaged", *passed_over]) if passed_over else "found no kept state"
    )
    raise CheckpointError(
        f"{folder}: {found}, expected one below {KEPT}",
        fix="put a copy of the folder in its place, or start again with --restart",
    )


def _states(folder: str) -> list[tuple[str, float]]:
    """Return the folders of the kept states, with the times at which they were kept, the newest first."""
    place = os.path.join(folder, KEPT)
    found: list[tuple[str, float]] = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(place), reverse=True):
            path = os.path.join(place, name)
            if name.isdigit():
                with contextlib.suppress(FileNotFoundError):
                    found.append((path, os.stat(path).st_mtime))
    return found


def _damage_of(state: str) -> CheckpointDamaged | None:
    """Return the first damage of a kept state."""
    return next(damage_of_state(state, int(os.path.basename(state))), None)
