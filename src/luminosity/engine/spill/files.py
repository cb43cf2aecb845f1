"""Files of many frames, written once from front to back and read at any place."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from luminosity.engine.spill import frames

__all__ = ["Chunk", "MemoryChunk", "SpillFile", "StoredChunk", "pieces"]

_PIECE_BYTES = 1 << 20  # large enough to compress well and to amortize a read

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

    def __init__(self, folder: str, restored_path: str | None = None) -> None:
        """Make a new file in ``folder``, or take over one that a checkpoint refers to."""
        self._folder = folder
        self.path = restored_path or os.path.join(folder, f"spill.{next(_numbers)}")
        flags = os.O_RDWR | os.O_CLOEXEC | (0 if restored_path else os.O_CREAT | os.O_EXCL)
        with frames.explain_full_disk(folder):
            self._descriptor = os.open(self.path, flags, 0o600)
        self._end = 0
        self._references = 1
        self._lock = threading.Lock()

    def append(self, data: bytes) -> StoredChunk:
        """Write data at the end. Returns the chunk that reads it back."""
        frame = frames.pack(data)
        with frames.explain_full_disk(self._folder):
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
        return frames.unpack(b"".join(parts))

    def share(self) -> SpillFile:
        """Add a reference."""
        with self._lock:
            self._references += 1
        return self

    def release(self) -> None:
        """Drop a reference. The last one closes and removes the file."""
        with self._lock:
            self._references -= 1
            is_last = self._references == 0
        if is_last:
            os.close(self._descriptor)
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
