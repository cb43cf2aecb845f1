"""What is at the destination already."""

from __future__ import annotations

import os
from itertools import islice

from apache_beam.io.filesystems import FileSystems

from luminosity.errors import TableError, WriteError
from luminosity.io.formats import recognise
from luminosity.io.writing import filesystem
from luminosity.io.writing.destination import TEMPORARY_PREFIX, Destination

__all__ = ["check", "leftovers", "table_files"]

_SHOWN = 3


def check(destination: Destination) -> None:
    """Refuse a path where the table can't be, or must not because something is there."""
    try:
        FileSystems.get_filesystem(destination.path)
    except ValueError as error:
        raise WriteError(f"{destination.path}: {error}") from error
    if destination.is_one_file:
        _check_file(destination)
    else:
        _check_folder(destination)


def table_files(destination: Destination) -> list[str]:
    """The files of the table that is there."""
    if destination.is_one_file:
        return [destination.path] if filesystem.exists(destination.path) else []
    return [filesystem.join(destination.path, name) for name in filesystem.visible_files(destination.path)]


def leftovers(destination: Destination) -> list[str]:
    """Folders of temporary files that runs of others left, who were killed."""
    return [
        filesystem.join(destination.path, name)
        for name in filesystem.names_in(destination.path)
        if name.startswith(TEMPORARY_PREFIX) and not name.endswith(destination.run_id)
    ]


def _check_file(destination: Destination) -> None:
    if filesystem.is_local(destination.path) and os.path.isdir(destination.path):
        raise WriteError(
            f"{destination.path}: a folder, but this name is that of one file; "
            f"say {destination.path}/ to write files into it, or choose another name"
        )
    if destination.if_exists == "fail" and filesystem.exists(destination.path):
        raise WriteError(f"{destination.path}: is there already; choose another name, or say if_exists='replace'")


def _check_folder(destination: Destination) -> None:
    if (
        filesystem.is_local(destination.path)
        and os.path.exists(destination.path)
        and not os.path.isdir(destination.path)
    ):
        raise WriteError(
            f"{destination.path}: a file, expected a folder, or a name that ends like {destination.suffix}"
        )
    if destination.if_exists == "append":
        return
    found = filesystem.visible_files(destination.path)
    if destination.if_exists == "fail":
        if shown := list(islice(found, _SHOWN + 1)):
            more = ", ..." if len(shown) > _SHOWN else ""
            raise WriteError(
                f"{destination.path}: the folder is not empty, "
                f"found {', '.join(shown[:_SHOWN])}{more}; choose another, "
                "or say if_exists='replace' or if_exists='append'"
            )
    elif strange := next((name for name in found if not _is_of_a_table(name)), None):
        raise WriteError(
            f"{destination.path}: found {strange}, "
            "which is no table's file; if_exists='replace' would remove all that is "
            "in the folder, so it must hold a table and nothing else. Choose another folder, or remove the file"
        )


def _is_of_a_table(name: str) -> bool:
    """By its suffix, and by folders named for values."""
    try:
        recognise(name)
    except TableError:
        return False
    return all("=" in folder for folder in name.split("/")[:-1])
