"""Checks a whole checkpoint, also while a run writes to it: what ``lum checkpoint DIR --check`` prints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from luminosity.engine.durable import tables
from luminosity.engine.durable.place import DATABASE, read_only
from luminosity.engine.durable.synced_log import MARK, boot_id, read_mark
from luminosity.engine.durable.tables import VERSION, damaged
from luminosity.engine.durable.upkeep.kept_states import damage_of_kept, kept_times
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
    damage: list[str] = field(default_factory=list[str])


def check(folder: str) -> Checked:
    """Compare everything in a checkpoint with its checksums. Changes nothing.

    Raises :class:`CheckpointError` if the folder has no checkpoint, or one of another version.
    """
    found = Checked(folder, kept=len(kept_times(folder)))
    for problem in _damage(folder, found):
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
            (found.rows,) = rows.execute("SELECT count(*) FROM rows").fetchone()
            found.blocks = sum(content.data is not None for content in tables.stored_contents(rows, database))
            files = tables.files_of(rows, database)
            of_files += tables.damage_of_files(rows, database)
            found.files = len(files) - len(of_files)
            found.file_bytes = sum(_size(os.path.join(folder, path)) for path in files)
        if of_files:
            with read_only(folder) as rows:  # a run that goes on may have removed files meanwhile
                files = tables.files_of(rows, database)
            yield from (problem for path, problem in of_files if path in files)
    except CheckpointDamaged as error:
        yield error
    yield from damage_of_kept(folder)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0  # it is named as missing
