"""The values of large groups in a file that a worker wrote, which other processes read where it lies.

A token names the file, and the frame there that says where the values are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from luminosity.engine.spill.files import SpillFile, StoredChunk

__all__ = ["chunks_of", "is_stored", "path_of", "token_of"]

_SEPARATOR = b":"


def token_of(file: SpillFile, chunks: Iterable[StoredChunk]) -> bytes:
    """Write to the file where the values of a group are. Returns the token of the group."""
    index = file.append(json.dumps([(chunk.offset, chunk.stored, chunk.size) for chunk in chunks]).encode())
    return _SEPARATOR.join((os.path.basename(file.path).encode(), b"%d" % index.offset, b"%d" % index.stored))


def is_stored(token: bytes) -> bool:
    """Return whether a large group's token names a file."""
    return _SEPARATOR in token


def path_of(token: bytes, folder: str) -> str:
    """Return the path of the file that a token names, in ``folder``."""
    return os.path.join(folder, token.partition(_SEPARATOR)[0].decode())


def chunks_of(token: bytes, file: SpillFile) -> list[StoredChunk]:
    """Return where the values of a group are, given its file."""
    _, offset, stored = token.split(_SEPARATOR)
    return [StoredChunk(file, *place) for place in json.loads(file.read(int(offset), int(stored)))]
