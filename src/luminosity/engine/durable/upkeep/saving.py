"""Saves a savepoint, also while a run writes its checkpoint: the run neither waits nor knows of it.

A reader of the database sees one transaction for as long as it reads, and each transaction is a checkpoint. The run may
remove files of blocks meanwhile, but only once a later transaction has dropped them. So the files get their links
first, and if one is gone, a reader that comes later sees a checkpoint without it. Links that are there stay for the
next try, so each has to make those of new files alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

from luminosity._shared.shared_files import sync_file, try_lock
from luminosity._shared.text import format_bytes
from luminosity.engine.data.world import THIS_MACHINE
from luminosity.engine.durable import tables
from luminosity.engine.durable.place import COPY_NOTE, DATABASE, SAVEPOINT_NOTE, read_only
from luminosity.engine.durable.synced_log import SyncedLog, boot_id, read_mark, sync_files
from luminosity.engine.durable.tables import NUMBER, VERSION, damaged, remedy_for
from luminosity.engine.durable.upkeep.savepoints import (
    META_KEY,
    UNFINISHED,
    Savepoint,
    check_left,
    savepoint_folder,
    sweep,
)
from luminosity.engine.durable.upkeep.states import copy_rows, damage_of_state, explain_disk, link, locked
from luminosity.errors import CheckpointDamaged, CheckpointError, CheckpointFailed
from luminosity.runs.run_ids import is_at_work

__all__ = ["Saved", "save"]

_LEAST_FREE = 2.0  # times what the copy needs: the run must go on beside it
_MOST_TRIES = 200  # each a few milliseconds, and two are rarely needed
_NEXT_START = "; the run continues from where it is"


@dataclass(frozen=True)
class Saved:
    """A savepoint that was saved, and what it took."""

    savepoint: Savepoint
    seconds: float
    tries: int  # until all files that a checkpoint named were there


def save(folder: str, name: str) -> Saved:
    """Save what is in a checkpoint folder now as a savepoint. ``name`` may be the path of a new folder.

    Everything is compared with its checksums before the savepoint gets its name. Raises :class:`CheckpointError` if
    there is nothing to save or the name is taken, :class:`CheckpointDamaged` if the checkpoint is damaged, and
    :class:`CheckpointFailed` if the disk is full.
    """
    folder = os.path.abspath(os.path.expanduser(folder))
    target = savepoint_folder(folder, name)
    began = THIS_MACHINE.clock.monotonic()
    _check_source(folder)
    _check_target(folder, target, name)
    _settle(folder)
    sweep(folder)
    unfinished = target + UNFINISHED
    with explain_disk(f"the savepoint {target} can't be saved{_NEXT_START}", os.path.dirname(target)):
        with _own_folder(unfinished):
            try:
                meta, tries = _copy(folder, unfinished)
                _check_meta(folder, meta)
                savepoint = _finish(folder, unfinished, os.path.basename(target), meta)
                if os.path.exists(target):
                    raise _taken(target)
                os.rename(unfinished, target)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                if os.sep not in name:
                    with contextlib.suppress(OSError):  # there are others
                        os.rmdir(os.path.dirname(target))
                raise
        sync_file(os.path.dirname(target))
    return Saved(replace(savepoint, folder=target), THIS_MACHINE.clock.monotonic() - began, tries)


def _check_source(folder: str) -> None:
    if os.path.exists(os.path.join(folder, SAVEPOINT_NOTE)):
        raise CheckpointError(
            f"found a savepoint in {folder}, expected the folder that --checkpoint_dir of a run names"
        )
    database = os.path.join(folder, DATABASE)
    with read_only(folder) as rows:
        version = tables.version_of(rows, database)
        meta = tables.stored_meta(rows, database) if version == VERSION else {}
    if version not in (VERSION, None):
        raise CheckpointError(
            f"the checkpoint in {folder} has version {version}, and this release reads version {VERSION}",
            fix="save it with the release that wrote it",
        )
    if _is_restoring(folder):
        raise CheckpointError(
            f"{folder} did not get all of the copy that it was restored from",
            fix="start its run with --restore_from again, then save a savepoint",
        )
    _check_meta(folder, meta)


def _is_restoring(folder: str) -> bool:
    try:
        return bool(json.loads(Path(folder, COPY_NOTE).read_text())["is_restoring"])
    except (OSError, ValueError, TypeError, KeyError):
        return False  # there is no copy


def _check_meta(folder: str, meta: dict[str, str]) -> None:
    """Raise if there is nothing to save. The run may have ended since the last look."""
    if "saved_at" not in meta:
        raise CheckpointError(f"nothing was saved in {folder} yet", fix="wait until the run has saved a checkpoint")
    if meta.get("state") in ("finished", "drained"):
        raise CheckpointError(
            f"the run in {folder} has {meta['state']}: nothing is left that another run could continue",
            fix="a new run begins where the sources of a drained one have ended: --continue_from"
            if meta["state"] == "drained"
            else "save a savepoint before the end of the run",
        )


def _check_target(folder: str, target: str, name: str) -> None:
    if os.path.lexists(target):
        raise _taken(target)
    place = os.path.dirname(target)
    if os.sep not in name:
        with explain_disk(f"the savepoint {target} can't be saved", folder):
            os.makedirs(place, mode=0o700, exist_ok=True)
    elif not os.path.isdir(place):
        raise CheckpointError(f"{target}: there is no folder {place}, expected one for the savepoint", fix="make it")
    elif os.path.commonpath([os.path.realpath(place), os.path.realpath(folder)]) == os.path.realpath(folder):
        raise CheckpointError(
            f"{target}: found a place in the checkpoint folder, expected a name or a place outside of it",
            fix=f"pass {os.path.basename(target)} alone",
        )


def _taken(target: str) -> CheckpointError:
    return CheckpointError(
        f"{target} is there already, expected a new name",
        fix="choose another name, or remove it: `lum checkpoint remove DIR NAME`",
    )


def _settle(folder: str) -> None:
    """After a reboot, cut off what the disk has beyond the last sync, as the next start would do."""
    mark = read_mark(folder)
    if mark is not None and mark.count and mark.boot != boot_id() and not is_at_work(folder):
        with contextlib.suppress(CheckpointError), locked(folder):  # else a run has just begun, and has done it
            SyncedLog(os.path.join(folder, DATABASE)).close()


@contextlib.contextmanager
def _own_folder(path: str) -> Generator[None]:
    """Make an empty folder that only this process works on. A process that is killed leaves it to the next one."""
    while True:
        check_left(path)
        os.makedirs(path, mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another process has just removed it as left over
            continue
        try:
            if not try_lock(descriptor):
                raise CheckpointError(f"another command is saving {path.removesuffix(UNFINISHED)} just now")
            try:
                is_same = os.path.samestat(os.fstat(descriptor), os.stat(path))
            except FileNotFoundError:
                is_same = False
            if is_same:
                for name in os.listdir(path):
                    left = os.path.join(path, name)
                    (shutil.rmtree if os.path.isdir(left) else os.unlink)(left)
                yield
                return
        finally:
            os.close(descriptor)


def _copy(folder: str, target: str) -> tuple[dict[str, str], int]:
    """Copy the database as it is now, with links to its files; return what it notes, and the number of tries."""
    database = os.path.join(folder, DATABASE)
    linked: set[str] = set()
    gone: set[str] = set()
    for tries in range(1, _MOST_TRIES + 1):
        with read_only(folder) as rows:
            files = tables.files_of(rows, database)
            if still := sorted(gone & files):
                # What a run removes, it has dropped before.
                raise damaged(os.path.join(folder, still[0]), "is missing", "data of blocks")
            gone = {path for path in sorted(files - linked) if not _link(folder, target, path, linked)}
            if gone:
                continue
            _check_room(rows, target)
            with _as_failure():
                copy_rows(rows, copy := os.path.join(target, DATABASE))
        for path in linked - files:
            os.unlink(os.path.join(target, path))
        with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as rows:
            return tables.stored_meta(rows, database), tries
    raise CheckpointError(
        f"the run in {folder} removes files faster than a savepoint can link to them",
        fix="try again, or stop the run first: a savepoint of a stopped run is one as well",
    )


@contextlib.contextmanager
def _as_failure() -> Generator[None]:
    """Keep an error of writing from being taken for damage of what is read."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise OSError(str(error)) from error


def _link(folder: str, target: str, path: str, linked: set[str]) -> bool:
    """Link to a file of blocks; return whether it is there."""
    try:
        link(os.path.join(folder, path), os.path.join(target, path))
    except FileNotFoundError:
        return False
    linked.add(path)
    return True


def _check_room(rows: sqlite3.Connection, target: str) -> None:
    (pages,) = rows.execute("PRAGMA page_count").fetchone()
    (page,) = rows.execute("PRAGMA page_size").fetchone()
    free = shutil.disk_usage(target).free
    if free < _LEAST_FREE * pages * page:
        raise CheckpointFailed(
            f"no savepoint is saved: {format_bytes(free)} are free in {os.path.dirname(target)}, expected "
            f"{format_bytes(int(_LEAST_FREE * pages * page))}: twice what its copy of the database takes, since the "
            "run needs room as well",
            fix="make room, or pass the path of a folder on another disk",
        )


def _finish(folder: str, target: str, name: str, meta: dict[str, str]) -> Savepoint:
    """Compare all of a new savepoint with its checksums, note what it is, and put it on the disk."""
    database = os.path.join(target, DATABASE)
    savepoint = Savepoint(
        folder=target,
        name=name,
        id=THIS_MACHINE.token(8),
        taken_at=round(THIS_MACHINE.clock.time(), 3),
        saved_at=float(meta["saved_at"]),
        number=int(meta[NUMBER]),
        source=folder,
        pipeline=meta.get("pipeline", ""),
    )
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as rows:
        noted = tables.meta_rows({META_KEY: savepoint.id, "state": "savepoint"})
        rows.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", noted)
    for problem in damage_of_state(target, savepoint.number):
        raise CheckpointDamaged(problem.message.replace(target, folder), fix=remedy_for(folder))
    sync_files(os.path.join(path, each) for path, _, names in os.walk(target) for each in names)
    for path, _, _ in os.walk(target, topdown=False):
        sync_file(path)
    savepoint.write()
    sync_file(target)
    return savepoint
