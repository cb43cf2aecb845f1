"""The SHA-256 of a file's bytes."""

from __future__ import annotations

import hashlib
import os

__all__ = ["file_digest"]

_CHUNK = 1 << 20  # bytes that are read at once


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits. Raises ``OSError`` if it can't be read.

    >>> file_digest(os.devnull)[:8]
    'e3b0c442'
    """
    digest = hashlib.sha256()  # hashlib.file_digest came with Python 3.11
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
