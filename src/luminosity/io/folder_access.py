"""Find out whether files can be made in a folder of this machine, before a run begins."""

from __future__ import annotations

import os

__all__ = ["why_not_writable"]


def why_not_writable(folder: str) -> str | None:
    """Return why no file can be made in the folder, or None if one can. Folders that do not exist yet can be made.

    >>> why_not_writable("/tmp/a/new/folder"), why_not_writable(__file__ + "/below") is None
    (None, False)
    """
    nearest = os.path.abspath(folder)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    if not os.path.isdir(nearest):
        return f"found a file at {nearest}, expected a folder"
    if os.access(nearest, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return None
    if os.statvfs(nearest).f_flag & os.ST_RDONLY:
        return f"the disk is read-only at {nearest}"
    return f"this user may not write to {nearest}"
