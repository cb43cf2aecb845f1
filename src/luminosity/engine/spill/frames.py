"""Compressed frames, the format of all data on disk, and the error for a full disk."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import struct
from collections.abc import Generator
from typing import Any

from luminosity._shared.text import format_bytes
from luminosity.errors import SpillFailed

__all__ = [
    "SUFFIX",
    "disk_full",
    "explain_full_disk",
    "is_full_disk",
    "pack",
    "read_file",
    "unpack",
    "write_all",
    "write_file",
]

SUFFIX = ".packed"  # of files that hold one frame

_HEADER = struct.Struct("<?QQ")  # compressed?, bytes of data, bytes that follow


@functools.cache
def _codec() -> Any:
    import pyarrow  # imported when first needed: it takes 0.2 s, and most runs never spill

    return pyarrow.Codec("lz4_raw")


def pack(data: bytes) -> bytes:
    """Return data as a frame, compressed if that makes it smaller.

    >>> unpack(pack(b"ab" * 100)) == b"ab" * 100, len(pack(b"ab" * 100)) < 200
    (True, True)
    """
    body: bytes = _codec().compress(data, asbytes=True) if data else b""
    is_smaller = len(body) < len(data)
    body = body if is_smaller else data
    return _HEADER.pack(is_smaller, len(data), len(body)) + body


def unpack(frame: bytes) -> bytes:
    """Return the data of a frame."""
    is_compressed, size, stored = _HEADER.unpack_from(frame)
    body = memoryview(frame)[_HEADER.size : _HEADER.size + stored]
    if len(body) < stored:
        raise EOFError(f"a frame of {stored} bytes ends after {len(body)}")
    return _codec().decompress(body, size, asbytes=True) if is_compressed else bytes(body)


def write_file(path: str, data: bytes) -> None:
    """Write a new file of one frame. If that fails, no part of it is left."""
    with explain_full_disk(os.path.dirname(path)):
        try:
            with open(path, "xb", buffering=0, opener=_private) as file:
                write_all(file.fileno(), pack(data))
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise


def read_file(path: str) -> bytes:
    """Return the data of a file of one frame."""
    with open(path, "rb", buffering=0) as file:
        return unpack(file.readall())


def write_all(descriptor: int, data: bytes) -> None:
    """Write all data, also if the system writes less at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def is_full_disk(error: OSError) -> bool:
    """Return whether a write failed because the disk or the user's quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def explain_full_disk(folder: str) -> Generator[None]:
    """Raise ``SpillFailed``, with a remedy, in place of the error for a full disk."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise disk_full(folder) from error


def disk_full(folder: str, details: str = "") -> SpillFailed:
    """Return the error for a full disk, with the space that is left in ``folder``."""
    try:
        usage = shutil.disk_usage(folder)
        room = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    except OSError as error:
        room = f"{error.strerror or error}"
    return SpillFailed(
        f"the disk is full: no room in {folder} ({room}) for data between two steps{details}",
        fix="free some space, name a folder on a larger disk (--spill_dir; with a checkpoint --checkpoint_dir), "
        "or raise --memory_budget",
    )
