"""SHA-256 digests of files and texts, in hexadecimal digits."""

from __future__ import annotations

import hashlib
import os

__all__ = ["file_digest", "text_digest"]

_CHUNK = 1 << 20  # bytes that are read at once


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the digest of a file's bytes. Raises ``OSError`` if it can't be read.

    >>> file_digest(os.devnull)[:8]
    'e3b0c442'
    """
    digest = hashlib.sha256()  # hashlib.file_digest came with Python 3.11
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def text_digest(*lines: str, digits: int = 64) -> str:
    """Return the first digits of the digest of a text, or of several lines.

    >>> text_digest("reviews", digits=8), text_digest("a", "b") == text_digest("a\\nb")
    ('54641051', True)
    """
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:digits]
