"""Checks a whole checkpoint, also while a run writes to it: what ``lum checkpoint DIR --check`` prints."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field

from luminosity.engine.durable import tables
from luminosity.engine.durable.place import DATABASE, SAVEPOINT_NOTE, read_only, unchanged
from luminosity.engine.durable.synced_log import MARK, boot_id, read_mark
from luminosity.engine.durable.tables import VERSION, damaged
from luminosity.engine.durable.upkeep.kept_states import damage_of_kept, kept_times
from luminosity.engine.durable.upkeep.savepoints import Savepoint, damage_of_savepoint, savepoints_of
from luminosity.errors import CheckpointDamaged, CheckpointError

__all__ = ["Checked", "check"]

_MOST_DAMAGE = 100  # that is named: more of it says no more


@dataclass
class Checked:
    """What was checked of a checkpoint, and what is damaged."""

    folder: str
    rows: int = 0
    blocks: int = 0  # whose data is in the database
    files: int = 0
    file_bytes: int = 0
    kept: int = 0  # earlier states
    savepoints: int = 0
    damage: list[str] = field(default_factory=list[str])


def check(folder: str) -> Checked:
    """Compare everything in a checkpoint, or in a savepoint, with its checksums. Changes nothing.

    Raises :class:`CheckpointError` if the folder has no checkpoint, or one of another version.
    """
    found = Checked(folder, kept=len(kept_times(folder)), savepoints=len(savepoints_of(folder)))
    is_savepoint = os.path.exists(os.path.join(folder, SAVEPOINT_NOTE))
    for problem in _damage_of_savepoint(folder, found) if is_savepoint else _damage(folder, found):
        found.damage.append(problem.message)
        if len(found.damage) == _MOST_DAMAGE:
            break
    return found


def _damage(folder: str, found: Checked) -> Iterator[CheckpointDamaged]:
    database = os.path.join(folder, DATABASE)
    mark = read_mark(folder)  # first: a run that goes on only raises the number in the database
    of_files: list[tuple[str, CheckpointDamaged]] = []
    try:
        with read_only(folder) as rows:
            version = tables.version_of(rows, database)
            if version not in (VERSION, None):
                raise CheckpointError(
                    f"the checkpoint in {folder} has version {version}, and this release reads version {VERSION}",
                    fix="check it with the release that wrote it",
                )
            if mark is None or not mark.count:
                held = "up to where the log of the database is on the disk"
                yield damaged(os.path.join(folder, MARK), "is missing" if mark is None else "can't be read", held)
            elif mark.unreadable:
                yield damaged(os.path.join(folder, MARK), "is damaged in part", "what its other entry has as well")
            if version is None and (mark is None or not mark.least(boot_id())):
                return
            yield from tables.damage_of_rows(rows, database, mark.least(boot_id()) if mark is not None else 0)
            _count(rows, folder, found)
            of_files += tables.damage_of_files(rows, database)
            found.files -= len(of_files)
        if of_files:
            with read_only(folder) as rows:  # a run that goes on may have removed files meanwhile
                files = tables.files_of(rows, database)
            yield from (problem for path, problem in of_files if path in files)
    except CheckpointDamaged as error:
        yield error
    yield from damage_of_kept(folder)
    for each in savepoints_of(folder):
        if isinstance(each, Savepoint):
            yield from (problem for problem in damage_of_savepoint(each.folder) if os.path.isdir(each.folder))
        else:
            yield each


def _damage_of_savepoint(folder: str, found: Checked) -> Iterator[CheckpointDamaged]:
    problems = list(damage_of_savepoint(folder))
    yield from problems
    if not problems:
        with unchanged(os.path.join(folder, DATABASE)) as rows:
            _count(rows, folder, found)


def _count(rows: sqlite3.Connection, folder: str, found: Checked) -> None:
    """Note how much there is. Compares the data of blocks with its checksums."""
    database = os.path.join(folder, DATABASE)
    (found.rows,) = rows.execute("SELECT count(*) FROM rows").fetchone()
    found.blocks = sum(content.data is not None for content in tables.stored_contents(rows, database))
    files = tables.files_of(rows, database)
    found.files = len(files)
    found.file_bytes = sum(_size(os.path.join(folder, path)) for path in files)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0  # it is named as missing
