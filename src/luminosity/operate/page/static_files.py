"""The files of the page: what is in the folder ``static``, by name and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["FOLDER", "SHELL", "content_of"]

FOLDER = Path(__file__).parent / "static"
SHELL = "index.html"  # one document for all addresses; its scripts look at the address
_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def content_of(name: str) -> tuple[bytes, str] | None:
    """Return the content and the media type of a file, or None if the folder has no file of this name.

    ``name`` is compared with the names in the folder, and is never made into a path: nothing outside can be named.
    """
    for entry in os.scandir(FOLDER) if FOLDER.is_dir() else ():
        if entry.name == name and entry.is_file(follow_symlinks=False):
            kind = _KINDS.get(os.path.splitext(name)[1])
            return None if kind is None else (Path(entry.path).read_bytes(), kind)
    return None
