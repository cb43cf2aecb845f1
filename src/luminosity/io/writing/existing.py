"""Check what exists at a destination already."""

from __future__ import annotations

import os
import time
from itertools import islice

from apache_beam.io.filesystems import FileSystems

from luminosity.errors import Fix, TableError, WriteError
from luminosity.io.folders import why_not_writable
from luminosity.io.formats import recognise
from luminosity.io.remote import explain_remote, give_options
from luminosity.io.run_owner import RunOwner, owner_in_name
from luminosity.io.writing import filesystem
from luminosity.io.writing.destination import TEMPORARY_PREFIX, Destination
from luminosity.runs.run_ids import CheckpointedRun

__all__ = ["check", "check_access", "leftovers", "make_temporary_folder", "table_files"]

_ABANDONED_S = 86_400  # how long nothing was written to a folder whose run may still work without its first process
_SHOWN_FILES = 3  # enough to recognise what is in a folder
_REPLACE = Fix(
    "pass if_exists='replace', or choose another path", command="add --if-exists replace, or choose another name"
)


def check(destination: Destination) -> None:
    """Raise if the table can't be written to this path, or must not because something exists there."""
    if not filesystem.is_local(destination.path):
        give_options()
        try:
            FileSystems.get_filesystem(destination.path)
            filesystem.exists(destination.path)
        except Exception as error:  # Each library has its own errors, for example for missing credentials.
            message, fix = explain_remote(destination.path, error, is_read=False)
            raise WriteError(f"{destination.path}: {message}", fix=fix) from error
    if destination.is_one_file:
        _check_file(destination)
    else:
        _check_folder(destination)


def make_temporary_folder(destination: Destination) -> None:
    """Make the folder of temporary files, which tells other runs who writes the table. The path is of this machine."""
    filesystem.make_folder(destination.temporary_folder)
    if isinstance(destination.owner, CheckpointedRun):
        destination.owner.mark(destination.temporary_folder, destination.checkpoint_dir)


def table_files(destination: Destination) -> list[str]:
    """Return the files of the table at the destination."""
    if destination.is_one_file:
        return [destination.path] if filesystem.exists(destination.path) else []
    return [filesystem.join(destination.path, name) for name in filesystem.visible_files(destination.path)]


def check_access(destination: Destination) -> None:
    """Raise if this user can't write the table, or if another run writes it right now. Called before a run.

    Only paths of this machine are checked. Several runs may append to a table at the same time.
    """
    if not filesystem.is_local(destination.path):
        return
    if reason := why_not_writable(destination.folder):
        raise WriteError(f"{destination.path}: {reason}", fix="choose another path, or make this one writable")
    if destination.if_exists == "append":
        return
    mine = (RunOwner.current(), destination.owner)
    for name in _temporary_folders(destination):
        owner = owner_in_name(name)
        if owner is not None and owner not in mine and owner.is_alive(filesystem.join(destination.folder, name)):
            raise WriteError(
                f"{destination.path}: {owner.describe()} is writing it right now",
                fix="wait until that run has ended, or choose another path",
            )


def leftovers(destination: Destination) -> list[str]:
    """Return folders with temporary files that killed runs of the same table left.

    Listing a bucket takes long, so only runs that replace a table look for them there.
    """
    if destination.if_exists != "replace" and not filesystem.is_local(destination.path):
        return []
    return [
        folder
        for name in _temporary_folders(destination)
        if not name.endswith(destination.run_id)
        and _is_abandoned(destination, name, folder := filesystem.join(destination.folder, name))
    ]


def _is_abandoned(destination: Destination, name: str, folder: str) -> bool:
    owner = owner_in_name(name)
    if owner is None:  # Only runs of earlier releases have such names.
        return destination.if_exists == "replace"
    is_alive = owner.is_alive(folder)
    if isinstance(owner, CheckpointedRun):
        return is_alive is False  # Otherwise the run may be continued, at any time.
    # On another runner, a run may outlive the process that started it, and several runs may append at the same time.
    may_outlive = is_alive is False and destination.if_exists == "append"
    if (is_alive is None and filesystem.is_local(folder)) or may_outlive:
        return time.time() - os.path.getmtime(folder) > _ABANDONED_S
    return is_alive is False


def _temporary_folders(destination: Destination) -> list[str]:
    """Return the names of the folders in which runs write this table. Old names tell no table: they lie in a folder."""
    return [
        name
        for name in filesystem.names_in(destination.folder)
        if name.startswith(TEMPORARY_PREFIX)
        and (f"-{destination.table_id}-" in name or (not destination.is_one_file and owner_in_name(name) is None))
    ]


def _check_file(destination: Destination) -> None:
    if filesystem.is_local(destination.path) and os.path.isdir(destination.path):
        raise WriteError(
            f"{destination.path}: found a folder, expected a file because of the suffix",
            fix=f"append a slash to write files into the folder ({destination.path}/), or choose another name",
        )
    if destination.if_exists == "fail" and filesystem.exists(destination.path):
        raise WriteError(f"{destination.path} exists already", fix=_REPLACE)


def _check_folder(destination: Destination) -> None:
    path = destination.path
    if filesystem.is_local(path) and os.path.exists(path) and not os.path.isdir(path):
        raise WriteError(f"{path}: found a file, expected a folder, or a name that ends in {destination.suffix}")
    if destination.if_exists == "append":
        return
    found = filesystem.visible_files(path)
    if destination.if_exists == "fail":
        if names := list(islice(found, _SHOWN_FILES + 1)):
            more = ", …" if len(names) > _SHOWN_FILES else ""
            raise WriteError(
                f"{path}: found {', '.join(names[:_SHOWN_FILES])}{more} in the folder, expected it to be empty",
                fix=Fix(
                    "pass if_exists='replace' or if_exists='append', or choose another folder",
                    command="add --if-exists replace or --if-exists append, or choose another folder",
                ),
            )
    elif other := next((name for name in found if not _is_table_file(name)), None):
        raise WriteError(
            f"{path}: found {other}, which is not a table file; replacing the table would remove everything in the "
            "folder, so it must contain nothing but the table",
            fix="choose another folder, or remove the file",
        )


def _is_table_file(name: str) -> bool:
    """Return whether a relative path has the suffix of a format, and only folders named ``column=value``."""
    try:
        recognise(name)
    except TableError:
        return False
    return all("=" in folder for folder in name.split("/")[:-1])
