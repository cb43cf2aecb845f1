"""A state of a checkpoint as a folder of its own: a copy of the database, with links to the files of blocks.

Kept states and savepoints are such folders. The files are at the same places as in the checkpoint. They are links where
the file system has them, so they cost no room as long as the checkpoint needs them as well.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

from luminosity._shared.shared_files import sync_file, try_lock
from luminosity._shared.text import format_bytes
from luminosity.engine.durable import tables
from luminosity.engine.durable.place import BEGINNING, DATABASE, LOCK, holder_of, unchanged
from luminosity.engine.durable.synced_log import MARK, reset_mark, sync_files
from luminosity.engine.durable.tables import BLOCKS, NUMBER, VERSION, damaged
from luminosity.errors import CheckpointDamaged, CheckpointError, CheckpointFailed

__all__ = ["copy_rows", "damage_of_state", "explain_disk", "link", "locked", "put_back"]

_WITHOUT_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_EVERYTHING = "everything of the run"


def copy_rows(rows: sqlite3.Connection, target: str) -> None:
    """Copy a database, as a connection sees it, to a new file. The caller syncs the file.

    SQLite must do it: if any code of a process opens and closes the file of a database that the process has open, the
    process loses its locks of it, and the next reader takes the log away as if nobody used it.
    """
    with contextlib.closing(sqlite3.connect(target, isolation_level=None)) as copy:
        copy.execute("PRAGMA synchronous = OFF")
        rows.backup(copy)
    os.chmod(target, 0o600)


def link(source: str, target: str) -> None:
    """Make a link to a file, or a copy if the file system has no links."""
    os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _WITHOUT_LINKS:
            raise
        shutil.copyfile(source, target)
        os.chmod(target, 0o600)


def damage_of_state(state: str, number: int, *, every: bool = False) -> Iterator[CheckpointDamaged]:
    """Yield the first damage of a state that ends with a transaction, or with ``every`` all damage."""
    database = os.path.join(state, DATABASE)
    if not os.path.isfile(database):
        yield damaged(database, "is missing", _EVERYTHING)
        return
    try:
        with tables.as_damage(database, _EVERYTHING), unchanged(database) as rows:
            for problem in _damage(rows, database, number):
                yield problem
                if not every:
                    return
    except CheckpointDamaged as error:
        yield error


def _damage(rows: sqlite3.Connection, database: str, number: int) -> Iterator[CheckpointDamaged]:
    if tables.version_of(rows, database) != VERSION:
        yield damaged(database, "has another version", _EVERYTHING)
        return
    yield from tables.damage_of_rows(rows, database, number)
    if int(tables.stored_meta(rows, database).get(NUMBER, 0)) != number:
        yield damaged(database, "is not the one that was kept", _EVERYTHING)
    for _ in tables.stored_contents(rows, database):
        pass
    yield from (problem for _, problem in tables.damage_of_files(rows, database))


def put_back(folder: str, state: str, meta: Mapping[str, str]) -> int:
    """Let a folder continue from a state, which stays. Returns the number of its last transaction.

    The caller has the lock of the folder. A checkpoint that is there is replaced: after a kill in between, starts are
    refused until it is done again, since the mark knows of later transactions. In a folder without a database, all is
    in place before the database is: until then, a file named ``BEGINNING`` tells that it was not complete.
    """
    database = os.path.join(folder, DATABASE)
    is_new = not os.path.exists(database)
    new = os.path.join(folder, BEGINNING) if is_new else f"{database}.new"
    for name in (new, f"{new}-wal", f"{new}-shm"):
        Path(name).unlink(missing_ok=True)
    shutil.copyfile(os.path.join(state, DATABASE), new)
    os.chmod(new, 0o600)
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as rows:
        found = tables.stored_meta(rows, new)
        number = int(found[NUMBER])
        # The next start makes a folder for its files: none that is there already.
        used = [int(name) for name in _names(os.path.join(folder, BLOCKS)) if name.isdigit()]
        generation = max([int(found.get("generation", 0)), *used])
        noted = tables.meta_rows({**meta, "generation": str(generation), "state": "stopped"})
        rows.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", noted)
        files = tables.files_of(rows, new)
    for path in files:
        kept, current = os.path.join(state, path), os.path.join(folder, path)
        if not (os.path.exists(current) and os.path.samefile(kept, current)):
            Path(current).unlink(missing_ok=True)
            link(kept, current)
    sync_files([new, *(os.path.join(folder, path) for path in files)])
    for name in (f"{database}-wal", f"{database}-shm"):
        Path(name).unlink(missing_ok=True)
    if is_new:
        reset_mark(os.path.join(folder, MARK), number)
        os.replace(new, database)
        sync_file(folder)
    else:
        os.replace(new, database)
        reset_mark(os.path.join(folder, MARK), number)
    return number


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def locked(folder: str) -> Generator[None]:
    """Hold the lock of a checkpoint folder. Raises :class:`CheckpointError` if a run has it."""
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


@contextlib.contextmanager
def explain_disk(what: str, folder: str) -> Generator[None]:
    """Raise :class:`CheckpointFailed`, with the room that is left and a remedy, in place of errors of the disk."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        room = ""
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(folder)
            room = f" ({format_bytes(usage.free)} of {format_bytes(usage.total)} free)"
        raise CheckpointFailed(f"{what}: {error}{room}", fix=_remedy(error)) from error


def _remedy(error: OSError | sqlite3.Error) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL or "disk is full" in str(error):
        return "make room, then try again"
    if number in _REFUSED or "readonly" in str(error):
        return "give this user the right to write there, or choose another place"
    return "find out what is wrong with the disk, then try again"
