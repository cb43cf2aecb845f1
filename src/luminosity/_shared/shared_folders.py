"""Whether other users can write to a folder that holds what a user trusts: records, checkpoints."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat

__all__ = ["is_own_file", "who_else_writes"]


def who_else_writes(folder: str | os.PathLike[str]) -> str:
    """Return in a sentence that other users can write to an existing folder, or an empty string if they can't.

    A folder that a group shares is meant to be shared if it has the sticky bit, with which nobody can remove or replace
    files of others.
    """
    found = os.stat(folder)
    mode = stat.S_IMODE(found.st_mode)
    described = f"mode {mode:04o}, owner {_user(found.st_uid)}, group {_group(found.st_gid)}"
    if os.geteuid() not in (found.st_uid, 0) and found.st_uid != 0:
        return f"{folder} belongs to another user ({described})"
    if mode & stat.S_IWOTH:
        what = "put files there" if mode & stat.S_ISVTX else "write there"
        return f"every user of this machine can {what}: {folder} ({described})"
    if mode & stat.S_IWGRP and not mode & stat.S_ISVTX and not _is_private(found.st_gid):
        return f"other users of the group can write there: {folder} ({described})"
    return ""


def is_own_file(descriptor: int) -> bool:
    """Return whether an open file is a plain one that this user or root has written."""
    found = os.fstat(descriptor)
    return stat.S_ISREG(found.st_mode) and found.st_uid in (os.geteuid(), 0)


def _is_private(gid: int) -> bool:
    """Return whether a group is that of this user alone, as many systems make one for each user."""
    if gid == 0:
        return True
    with contextlib.suppress(KeyError):
        mine, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
        return mine.pw_gid == gid and group.gr_name == mine.pw_name and not {*group.gr_mem} - {mine.pw_name}
    return False


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
