"""Savepoints: complete copies of a checkpoint that the user has named, and from which runs start.

A savepoint is a folder below ``savepoints`` of the checkpoint folder, or one that the user names. Nothing changes it,
and only the user removes it. Its note has what the database has as well, so that parts of two are not taken for one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luminosity._shared.shared_files import replace_file, try_lock
from luminosity._shared.text import did_you_mean
from luminosity.engine.durable import tables
from luminosity.engine.durable.place import (
    BEGINNING,
    DATABASE,
    SAVEPOINT_NOTE,
    check_names,
    read_only,
    remains_of,
    unchanged,
)
from luminosity.engine.durable.tables import BLOCKS, KEPT, SAVEPOINTS, damaged
from luminosity.engine.durable.upkeep.states import damage_of_state, explain_disk, locked, put_back
from luminosity.errors import CheckpointDamaged, CheckpointError
from luminosity.runs.run_ids import is_at_work

__all__ = [
    "META_KEY",
    "UNFINISHED",
    "Savepoint",
    "begin_from",
    "check_left",
    "damage_of_savepoint",
    "read_savepoint",
    "remove_savepoint",
    "restore_savepoint",
    "savepoint_folder",
    "savepoints_of",
    "sweep",
]

_LOGGER = logging.getLogger(__name__)

META_KEY = "savepoint"  # of a database: the id of the savepoint that it is, or with which its run has begun
UNFINISHED = ".unfinished"  # behind the name of a savepoint that is being saved or removed
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_RESERVED = ("last",)  # what --restore takes beside names
_PARTS = {  # of a savepoint
    *(f"{DATABASE}{end}" for end in ("", "-journal", "-shm", "-wal")),
    BLOCKS,
    SAVEPOINT_NOTE,
    f"{SAVEPOINT_NOTE}.unfinished",  # while it is being written
}


@dataclass(frozen=True)
class Savepoint:
    """What the note of a savepoint says."""

    folder: str
    name: str
    id: str
    taken_at: float  # seconds since 1970
    saved_at: float  # when the checkpoint was saved that it has
    number: int  # of its last transaction
    source: str  # the checkpoint folder
    pipeline: str

    def write(self) -> None:
        """Write the note into the folder, which is complete then."""
        noted = {key: value for key, value in self.__dict__.items() if key != "folder"}
        text = json.dumps({**noted, "sum": _sum(noted)}, indent=2)
        replace_file(os.path.join(self.folder, SAVEPOINT_NOTE), text, is_private=True, is_synced=True)

    def sizes(self) -> tuple[int, int]:
        """Return the bytes of all files, and of those that nothing else has a link to: its removal frees them."""
        whole = own = 0
        for path, _, names in os.walk(self.folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(os.path.join(path, name))
                    whole += found.st_size
                    own += found.st_size if found.st_nlink == 1 else 0
        return whole, own


def savepoint_folder(folder: str, name: str) -> str:
    """Return where the savepoint of a name lies. A path, which has a slash, is a savepoint elsewhere.

    >>> savepoint_folder("/work/checkpoint", "before-v2")
    '/work/checkpoint/savepoints/before-v2'
    >>> savepoint_folder("/work/checkpoint", "/backup/before-v2")
    '/backup/before-v2'
    """
    path = os.path.abspath(os.path.expanduser(name)) if os.sep in name else ""
    last = os.path.basename(path) if path else name
    if not _NAME.fullmatch(last) or last in _RESERVED or last.endswith(UNFINISHED):
        raise CheckpointError(
            f"found the name {name!r}, expected up to 100 letters, digits, '.', '_' and '-' (but not 'last'), or the "
            "path of a folder"
        )
    return path or os.path.join(os.path.abspath(os.path.expanduser(folder)), SAVEPOINTS, name)


def savepoints_of(folder: str) -> list[Savepoint | CheckpointDamaged]:
    """Return the savepoints in a checkpoint folder, the newest first, and what is wrong with those without a note."""
    place = os.path.join(folder, SAVEPOINTS)
    found: list[Savepoint] = []
    wrong: list[CheckpointDamaged] = []
    for name in _names(place):
        if not name.endswith(UNFINISHED) and os.path.isdir(os.path.join(place, name)):
            try:
                found.append(read_savepoint(os.path.join(place, name)))
            except CheckpointDamaged as error:
                wrong.append(error)
            except CheckpointError:
                note = os.path.join(place, name, SAVEPOINT_NOTE)
                wrong.append(damaged(note, "is missing", "what the savepoint is"))
    found.sort(key=lambda each: -each.taken_at)
    return [*found, *wrong]


def read_savepoint(path: str) -> Savepoint:
    """Return the savepoint in a folder.

    Raises :class:`CheckpointError` if there is none, and :class:`CheckpointDamaged` if its note can't be read.
    """
    path = os.path.abspath(os.path.expanduser(path))
    note = os.path.join(path, SAVEPOINT_NOTE)
    if not os.path.exists(os.path.join(path, DATABASE)) and not os.path.exists(note):
        place, name = os.path.split(path)
        others = [each for each in _names(place) if os.path.exists(os.path.join(place, each, SAVEPOINT_NOTE))]
        hint = did_you_mean(name, others) or (f"there are {', '.join(others)}" if others else "")
        raise CheckpointError(f"found no savepoint in {path}", fix=hint or "save one: `lum checkpoint save DIR NAME`")
    try:
        noted: dict[str, Any] = json.loads(Path(note).read_text())
        checksum = noted.pop("sum")
        if checksum == _sum(noted):
            return Savepoint(path, **noted)
    except FileNotFoundError:
        raise CheckpointError(
            f"found a checkpoint in {path}, expected a savepoint", fix="save one: `lum checkpoint save DIR NAME`"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    raise damaged(note, "can't be read, or differs from what was written", "what the savepoint is")


def damage_of_savepoint(path: str) -> Iterator[CheckpointDamaged]:
    """Yield what is damaged in a savepoint. Reads all of it.

    Raises :class:`CheckpointError` if there is none.
    """
    try:
        savepoint = read_savepoint(path)
    except CheckpointDamaged as error:
        yield error
        return
    found = list(damage_of_state(savepoint.folder, savepoint.number, every=True))
    yield from found
    if found:
        return
    database = os.path.join(savepoint.folder, DATABASE)
    with unchanged(database) as rows:
        if tables.stored_meta(rows, database).get(META_KEY) != savepoint.id:
            yield damaged(database, "is not the one of this savepoint", "everything of the run")


def check_left(path: str) -> None:
    """Raise :class:`CheckpointError` unless all in a folder is of a savepoint, so that it may be removed."""
    found = [] if os.path.isdir(path) and not os.path.islink(path) else [path] if os.path.lexists(path) else []
    if others := found or sorted(set(_names(path)) - _PARTS):
        raise CheckpointError(
            f"found {others[0]!r} in {path}, expected parts of a savepoint alone, which could be removed",
            fix="move it away, or choose another name for the savepoint",
        )


def remove_savepoint(path: str) -> int:
    """Remove a savepoint, whether or not it is damaged; return how many bytes that has freed.

    Raises :class:`CheckpointError` if there is none. A folder with anything else stays.
    """
    freed = 0
    try:
        savepoint = read_savepoint(path)
        path, freed = savepoint.folder, savepoint.sizes()[1]
    except CheckpointDamaged:
        check_left(path)
    except CheckpointError:
        if not os.path.isdir(path) or os.path.basename(os.path.dirname(path)) != SAVEPOINTS:
            raise
        check_left(path)
    check_left(path + UNFINISHED)
    with explain_disk(f"the savepoint {path} can't be removed", path):
        shutil.rmtree(path + UNFINISHED, ignore_errors=True)  # of a command that was killed
        os.rename(path, path + UNFINISHED)
        shutil.rmtree(path + UNFINISHED, ignore_errors=True)  # `sweep` may be at it as well
    return freed


def sweep(folder: str) -> None:
    """Remove what commands that were killed have left of savepoints in a checkpoint folder."""
    place = os.path.join(folder, SAVEPOINTS)
    for name in _names(place):
        if name.endswith(UNFINISHED):
            with contextlib.suppress(OSError):
                left = os.open(path := os.path.join(place, name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    if try_lock(left):  # else a command is at work on it
                        shutil.rmtree(path)
                finally:
                    os.close(left)


def restore_savepoint(folder: str, name: str) -> Savepoint:
    """Put a savepoint in place of the checkpoint in a folder. Kept states, which came after it, are removed.

    Raises :class:`CheckpointError` if there is none, if it is damaged, or if a run uses the folder.
    """
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such folder, expected one that --checkpoint_dir of a run names")
    savepoint = read_savepoint(savepoint_folder(folder, name))
    with locked(folder), explain_disk(f"{folder} can't go back to {savepoint.folder}", folder):
        for problem in damage_of_savepoint(savepoint.folder):
            raise problem
        put_back(folder, savepoint.folder, {META_KEY: savepoint.id})
        shutil.rmtree(os.path.join(folder, KEPT), ignore_errors=True)
    return savepoint


def begin_from(folder: str, path: str) -> None:
    """Let a run in a new folder begin with a savepoint. Does nothing if it has begun with it already.

    Raises :class:`CheckpointError` if the savepoint is damaged, or if the folder has something else.
    """
    savepoint = read_savepoint(path)
    with explain_disk(f"{folder} can't begin with {savepoint.folder}", os.path.dirname(folder)):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not os.path.exists(os.path.join(folder, BEGINNING)):
            check_names(folder)
        with locked(folder):
            if _has_begun(folder, savepoint):
                return
            for problem in damage_of_savepoint(savepoint.folder):
                raise problem
            put_back(folder, savepoint.folder, {META_KEY: savepoint.id})
    _LOGGER.warning("beginning with the savepoint %s of the run in %s", savepoint.name, savepoint.source)
    if is_at_work(savepoint.source):
        _LOGGER.warning(
            "the run in %s goes on: both runs write to the places that their pipelines name; give one of them others",
            savepoint.source,
        )


def _has_begun(folder: str, savepoint: Savepoint) -> bool:
    """Return whether a folder has something that an opening must look at; raise if it is of something else."""
    if not os.path.exists(database := os.path.join(folder, DATABASE)):
        return not os.path.exists(os.path.join(folder, BEGINNING)) and bool(remains_of(folder))
    try:
        with read_only(folder) as rows:
            meta = {} if tables.version_of(rows, database) is None else tables.stored_meta(rows, database)
    except CheckpointDamaged:
        return True
    if "saved_at" in meta and meta.get(META_KEY) != savepoint.id:
        raise CheckpointError(
            f"--savepoint={savepoint.folder}: found a checkpoint in {folder} that did not begin with it, expected an "
            "empty folder",
            fix=f"choose a new --checkpoint_dir, leave out --savepoint, or go back: `lum checkpoint {folder} --restore "
            f"{savepoint.folder}`",
        )
    return "saved_at" in meta


def _names(place: str) -> list[str]:
    try:
        return sorted(os.listdir(place))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sum(noted: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(noted, sort_keys=True).encode())
