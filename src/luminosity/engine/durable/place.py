"""What lies in a checkpoint folder, and whether it may be opened or read: damage must not look like a new folder."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Generator
from pathlib import Path

from luminosity.engine.durable.synced_log import MARK, read_mark
from luminosity.engine.durable.tables import BLOCKS, KEPT, SAVEPOINT_NOTE, SAVEPOINTS, as_damage, damaged
from luminosity.errors import CheckpointError

__all__ = [
    "BEGINNING",
    "COPY_NOTE",
    "DATABASE",
    "LOCK",
    "OPEN_HERE",
    "SAVEPOINT_NOTE",
    "SPOOL",
    "check_database",
    "check_names",
    "holder_of",
    "read_only",
    "remains_of",
    "snapshot",
    "unchanged",
]

DATABASE = "checkpoint.sqlite"
# The databases that this process has open. It must not read their files past SQLite: closing a file gives up all locks
# that the process has of it, and the next reader elsewhere takes the log away as if nobody used it.
OPEN_HERE: set[str] = set()
LOCK = "lock"
COPY_NOTE = "copy.json"  # about the copy of the checkpoint, if there is one
SPOOL = "copying"  # what is on its way to the copy
BEGINNING = f"{DATABASE}.beginning"  # the database while a new folder gets what a savepoint has
_LOG = f"{DATABASE}-wal"
_OWN_NAMES = frozenset(
    {DATABASE, _LOG, f"{DATABASE}-shm", LOCK, MARK, BLOCKS, KEPT, SAVEPOINTS, COPY_NOTE, SPOOL, "run-id"}
)
_EVERYTHING = "everything of the run"
_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100  # of the database
_HAS_LOG = b"\2\2"  # in the header: other values let SQLite ignore the log
_AT_LOG = 18  # where that is


def check_names(path: str) -> None:
    """Refuse a folder with other files: a run removes files of its own there."""
    if not os.path.isdir(path):
        return
    if os.path.exists(os.path.join(path, SAVEPOINT_NOTE)):
        raise CheckpointError(
            f"found a savepoint in {path}, expected a folder that a run may change",
            fix=f"start with a new --checkpoint_dir and --savepoint={path}: the savepoint stays as it is",
        )
    others = sorted(set(os.listdir(path)) - _OWN_NAMES)
    if BEGINNING in others:
        raise CheckpointError(
            f"{path} is not complete: it did not get all that a savepoint has",
            fix="repeat the command with --savepoint or --restore that was interrupted",
        )
    if others and not os.path.exists(os.path.join(path, DATABASE)):
        raise CheckpointError(
            f"found {others[0]!r} in {path}, expected a new or empty folder, or the checkpoint of a run",
            fix="choose another --checkpoint_dir",
        )


def check_database(path: str) -> None:
    """Raise :class:`CheckpointDamaged` if a folder lacks the database that it had, or if SQLite would misread it.

    Call it before SQLite opens the database, which may change files.
    """
    database = os.path.join(path, DATABASE)
    if os.path.realpath(database) in OPEN_HERE:
        return
    try:
        with open(database, "rb") as file:
            header = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        header = None
    if not header:
        if remains := remains_of(path):
            found = "is missing" if header is None else "is empty"
            raise damaged(database, f"{found}, though the folder has {' and '.join(map(repr, remains))}", _EVERYTHING)
    elif not header.startswith(_MAGIC):
        raise damaged(database, "can't be opened: it does not begin as a database", _EVERYTHING)
    elif header[_AT_LOG : _AT_LOG + len(_HAS_LOG)] != _HAS_LOG:
        raise damaged(database, "can't be opened: its header does not name its log", _EVERYTHING)


def remains_of(path: str) -> list[str]:
    """Return the names of what belongs to the database of a checkpoint in a folder, which may lack it."""
    found: list[str] = []
    if _size(os.path.join(path, _LOG)):
        found.append(_LOG)
    mark = read_mark(path)
    if mark is not None and (mark.written or mark.synced or mark.unreadable):
        found.append(MARK)
    return found + [name for name in (BLOCKS, KEPT, SAVEPOINTS) if os.path.isdir(os.path.join(path, name))]


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0


def holder_of(path: str) -> str:
    """Return who holds the lock of a checkpoint folder, in words. Empty if it is not known."""
    try:
        holder = json.loads(Path(path, LOCK).read_text())
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        return f"process {holder['pid']} on {holder['host']} since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@contextlib.contextmanager
def read_only(folder: str) -> Generator[sqlite3.Connection]:
    """Within the context, everything that is read is of one checkpoint of a folder.

    Raises :class:`CheckpointError` if the folder has none, and :class:`CheckpointDamaged` if it can't be read.
    """
    database = os.path.join(folder, DATABASE)
    is_file = os.path.isfile(folder)
    if not is_file:
        check_database(folder)
    if not os.path.isfile(database):
        found = (
            "found no checkpoint in it" if os.path.isdir(folder) else "found a file" if is_file else "no such folder"
        )
        raise CheckpointError(f"{folder}: {found}, expected a folder that --checkpoint_dir of a run names")
    is_savepoint = os.path.exists(os.path.join(folder, SAVEPOINT_NOTE))
    with as_damage(database, _EVERYTHING), (unchanged if is_savepoint else snapshot)(database) as rows:
        yield rows


@contextlib.contextmanager
def snapshot(database: str) -> Generator[sqlite3.Connection]:
    """Within the context, everything that is read from a database is of one transaction."""
    with contextlib.closing(sqlite3.connect(f"{Path(database).absolute().as_uri()}?mode=ro", uri=True)) as rows:
        rows.execute("BEGIN")
        yield rows


@contextlib.contextmanager
def unchanged(database: str) -> Generator[sqlite3.Connection]:
    """Read a database that nothing writes to, and that has no log."""
    uri = f"{Path(database).absolute().as_uri()}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as rows:
        yield rows
