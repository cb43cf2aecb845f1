"""Compressed frames, the format of all data on disk; files of many frames; and the error for a full disk."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import shutil
import struct
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from luminosity._shared.text import format_bytes
from luminosity.errors import SpillFailed

__all__ = [
    "SUFFIX",
    "Chunk",
    "MemoryChunk",
    "SpillFile",
    "StoredChunk",
    "disk_full",
    "is_full_disk",
    "pack",
    "pieces",
    "read_file",
    "unpack",
    "write_all",
    "write_file",
]

SUFFIX = ".packed"  # of files that hold one frame
_HEADER = struct.Struct("<?QQ")  # compressed?, bytes of data, bytes that follow
_PIECE_BYTES = 1 << 20  # large enough to compress well and to amortize a read


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


def write_all(descriptor: int, data: bytes | memoryview) -> None:
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


_numbers = itertools.count(1)


class Chunk(Protocol):
    """A piece of data, in memory or on disk."""

    @property
    def size(self) -> int:
        """The number of bytes that :meth:`read` returns."""
        ...

    def read(self) -> bytes:
        """Return the data."""
        ...


class MemoryChunk(NamedTuple):
    """A chunk in memory."""

    data: bytes

    @property
    def size(self) -> int:
        """The number of bytes."""
        return len(self.data)

    def read(self) -> bytes:
        """Return the data."""
        return self.data


class StoredChunk(NamedTuple):
    """A chunk on disk: one frame of a file."""

    file: SpillFile
    offset: int
    stored: int  # bytes in the file
    size: int  # bytes of data

    def read(self) -> bytes:
        """Read the data from the file."""
        return self.file.read(self.offset, self.stored)


class SpillFile:
    """A file that is removed with its last reference.

    Each holder calls :meth:`release` once. One thread appends; any thread may read, share and release.
    """

    def __init__(self, folder: str, restored_path: str | None = None, *, name: str = "") -> None:
        """Make a new file in ``folder``, called ``name`` if that matters, or take over one that exists."""
        self._folder = folder
        self.path = restored_path or os.path.join(folder, name or f"spill.{next(_numbers)}")
        flags = os.O_RDWR | os.O_CLOEXEC | (0 if restored_path else os.O_CREAT | os.O_EXCL)
        with explain_full_disk(folder):
            self._descriptor = os.open(self.path, flags, 0o600)
        self._end = 0
        self._references = 1
        self._is_kept = False
        self._lock = threading.Lock()

    def append(self, data: bytes) -> StoredChunk:
        """Write data at the end. Returns the chunk that reads it back."""
        frame = pack(data)
        with explain_full_disk(self._folder):
            written = 0
            while written < len(frame):  # at ``_end``, over anything that a failed write has left there
                written += os.pwrite(self._descriptor, memoryview(frame)[written:], self._end + written)
        chunk = StoredChunk(self, self._end, len(frame), len(data))
        self._end += len(frame)
        return chunk

    def read(self, offset: int, stored: int) -> bytes:
        """Return the data of a frame of ``stored`` bytes at ``offset``."""
        parts: list[bytes] = []
        while stored:  # a single read returns at most 2 GiB
            part = os.pread(self._descriptor, stored, offset)
            if not part:
                raise EOFError(f"{self.path} ends before byte {offset + stored}")
            parts.append(part)
            offset += len(part)
            stored -= len(part)
        return unpack(b"".join(parts))

    def share(self) -> SpillFile:
        """Add a reference."""
        with self._lock:
            self._references += 1
        return self

    def keep(self) -> None:
        """Leave the file where it is after the last reference: another process takes it over."""
        self._is_kept = True

    @property
    def is_released(self) -> bool:
        """Whether the last reference was dropped."""
        return self._references == 0

    def release(self) -> None:
        """Drop a reference. The last one closes and removes the file."""
        with self._lock:
            self._references -= 1
            is_last = self._references == 0
        if is_last:
            os.close(self._descriptor)
            if not self._is_kept:
                os.unlink(self.path)


def pieces(values: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the values joined into pieces of about a megabyte."""
    piece: list[bytes] = []
    size = 0
    for value in values:
        piece.append(value)
        size += len(value)
        if size >= _PIECE_BYTES:
            yield b"".join(piece)
            piece, size = [], 0
    if piece:
        yield b"".join(piece)
