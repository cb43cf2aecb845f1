"""What is at the target already."""

from __future__ import annotations

import os
from itertools import islice

from luminosity.errors import TableError, WriteError
from luminosity.io.formats import recognise
from luminosity.io.writing import files
from luminosity.io.writing.target import TEMPORARY_PREFIX, Target

__all__ = ["check", "leftovers", "table_files"]

_SHOWN = 3


def check(target: Target) -> None:
    """Refuse a path where the table can't be, or must not because something is there."""
    if target.is_one_file:
        _check_file(target)
    else:
        _check_folder(target)


def table_files(target: Target) -> list[str]:
    """The files of the table that is there."""
    if target.is_one_file:
        return [target.path] if files.exists(target.path) else []
    return [files.join(target.path, name) for name in files.visible_files(target.path)]


def leftovers(target: Target) -> list[str]:
    """Folders of temporary files that runs of others left, who were killed."""
    return [
        files.join(target.path, name)
        for name in files.names_in(target.path)
        if name.startswith(TEMPORARY_PREFIX) and not name.endswith(target.run_id)
    ]


def _check_file(target: Target) -> None:
    if files.is_local(target.path) and os.path.isdir(target.path):
        raise WriteError(
            f"{target.path}: a folder, but this name is that of one file; "
            f"say {target.path}/ to write files into it, or choose another name"
        )
    if target.if_exists == "fail" and files.exists(target.path):
        raise WriteError(f"{target.path}: is there already; choose another name, or say if_exists='replace'")


def _check_folder(target: Target) -> None:
    if files.is_local(target.path) and os.path.exists(target.path) and not os.path.isdir(target.path):
        raise WriteError(f"{target.path}: a file, expected a folder, or a name that ends like {target.suffix}")
    if target.if_exists == "append":
        return
    found = files.visible_files(target.path)
    if target.if_exists == "fail":
        if shown := list(islice(found, _SHOWN + 1)):
            more = ", ..." if len(shown) > _SHOWN else ""
            raise WriteError(
                f"{target.path}: the folder is not empty, found {', '.join(shown[:_SHOWN])}{more}; choose another, "
                "or say if_exists='replace' or if_exists='append'"
            )
    elif strange := next((name for name in found if not _is_of_a_table(name)), None):
        raise WriteError(
            f"{target.path}: found {strange}, which is no table's file; if_exists='replace' would remove all that is "
            "in the folder, so it must hold a table and nothing else. Choose another folder, or remove the file"
        )


def _is_of_a_table(name: str) -> bool:
    """By its suffix, and by folders named for values."""
    try:
        recognise(name)
    except TableError:
        return False
    return all("=" in folder for folder in name.split("/")[:-1])
