"""Earlier states of a checkpoint, kept beside it for the case that it is damaged, and how one is put back.

A kept state is a folder below ``kept`` with the number of its last transaction as its name: a copy of the database, and
the files of blocks at the same places as in the checkpoint. These are links where the file system has them, so they
cost no room as long as the checkpoint needs them as well.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sqlite3
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from luminosity._shared.shared_files import sync_file, try_lock
from luminosity._shared.text import format_bytes
from luminosity.engine.data.world import Clock
from luminosity.engine.durable import tables
from luminosity.engine.durable.place import DATABASE, LOCK, holder_of, snapshot
from luminosity.engine.durable.synced_log import MARK, reset_mark, sync_files
from luminosity.engine.durable.tables import BLOCKS, KEPT, NUMBER, VERSION, damaged
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
            _copy(database, copy)
            with _unchanged(copy) as state:
                for problem in tables.damage_of_rows(state, database, 0):
                    raise problem
                number = int(tables.stored_meta(state, copy)[NUMBER])
            for path in files:
                _link(os.path.join(self._folder, path), os.path.join(new, path))
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
    with _locked(folder):
        passed_over: list[str] = []
        for path, kept_at in _states(folder):
            if (problem := _damage_of(path)) is None:
                return Restored(_put_back(folder, path), kept_at, passed_over)
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


def _copy(database: str, target: str) -> None:
    """Copy a database that this process has open, as it is on the disk.

    SQLite must do it: if any code of the process opens and closes the file, the process loses its locks of it, and the
    next reader takes the log away as if nobody used it. A connection of its own has nothing in memory yet.
    """
    with snapshot(database) as rows, contextlib.closing(sqlite3.connect(target, isolation_level=None)) as copy:
        copy.execute("PRAGMA synchronous = OFF")  # the caller syncs it
        rows.backup(copy)
    os.chmod(target, 0o600)


@contextlib.contextmanager
def _unchanged(database: str) -> Generator[sqlite3.Connection]:
    """Read a database that nothing writes to, and that has no log."""
    uri = f"{Path(database).absolute().as_uri()}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as rows:
        yield rows


def _damage_of(state: str) -> CheckpointDamaged | None:
    """Return the first damage of a kept state."""
    database = os.path.join(state, DATABASE)
    try:
        if not os.path.isfile(database):
            return damaged(database, "is missing", "everything of the run")
        with tables.as_damage(database, "everything of the run"), _unchanged(database) as rows:
            if tables.version_of(rows, database) != VERSION:
                return damaged(database, "has another version", "everything of the run")
            number = int(os.path.basename(state))
            if tables.check_rows(rows, database, number) != number:
                return damaged(database, "is not the one that was kept", "everything of the run")
            for _ in tables.stored_contents(rows, database):
                pass
            tables.check_files(rows, database)
    except CheckpointDamaged as error:
        return error
    return None


def _put_back(folder: str, state: str) -> int:
    """Replace the checkpoint in a folder by a kept state, which stays. Returns the number of its last transaction.

    After a kill in between, starts are refused until it is done again: the mark knows of later transactions.
    """
    database = os.path.join(folder, DATABASE)
    new = f"{database}.new"
    for name in (new, f"{new}-wal", f"{new}-shm"):
        Path(name).unlink(missing_ok=True)
    shutil.copyfile(os.path.join(state, DATABASE), new)
    os.chmod(new, 0o600)
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as rows:
        meta = tables.stored_meta(rows, new)
        number = int(meta[NUMBER])
        # The next start makes a folder for its files: none that is there already.
        used = [int(name) for name in _names(os.path.join(folder, BLOCKS)) if name.isdigit()]
        generation = max([int(meta.get("generation", 0)), *used])
        noted = tables.meta_rows({"generation": str(generation), "state": "stopped"})
        rows.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", noted)
        files = tables.files_of(rows, new)
    for path in files:
        kept, current = os.path.join(state, path), os.path.join(folder, path)
        if not (os.path.exists(current) and os.path.samefile(kept, current)):
            Path(current).unlink(missing_ok=True)
            _link(kept, current)
    sync_files([new, *(os.path.join(folder, path) for path in files)])
    for name in (f"{database}-wal", f"{database}-shm"):
        Path(name).unlink(missing_ok=True)
    os.replace(new, database)
    reset_mark(os.path.join(folder, MARK), number)
    return number


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _link(source: str, target: str) -> None:
    """Make a link to a file, or a copy if the file system has no links."""
    os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)
        os.chmod(target, 0o600)


@contextlib.contextmanager
def _locked(folder: str) -> Generator[None]:
    lock = os.open(os.path.join(folder, LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(lock):
            holder = holder_of(folder)
            raise CheckpointError(
                f"the checkpoint folder {folder} is in use{f' by {holder}' if holder else ''}",
                fix=f"stop that run with `lum stop {folder}`",
            )
        yield
    finally:
        os.close(lock)
