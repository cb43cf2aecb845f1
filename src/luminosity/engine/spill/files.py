"""Files of many frames, written once from front to back and read anywhere."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from luminosity.engine.spill import frames

_numbers = itertools.count(1)
_PIECE_BYTES = 1 << 20


class Chunk(Protocol):
    """A piece of data, in memory or on disk."""

    @property
    def size(self) -> int: ...

    def read(self) -> bytes: ...


class MemoryChunk(NamedTuple):
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self) -> bytes:
        return self.data


class StoredChunk(NamedTuple):
    """One frame of a file."""

    file: SpillFile
    offset: int
    stored: int
    size: int

    def read(self) -> bytes:
        return self.file.read(self.offset, self.stored)


class SpillFile:
    """Whoever holds it releases it once; with the last reference it is gone. Reads may come from any thread."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.path = os.path.join(folder, f"spill.{next(_numbers)}")
        with frames.full_disk_is_clear(folder):
            self._descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._end = 0
        self._references = 1
        self._lock = threading.Lock()

    def append(self, data: bytes) -> StoredChunk:
        frame = frames.pack(data)
        with frames.full_disk_is_clear(self._folder):
            written = 0
            while written < len(frame):  # at the end, whatever a write that failed has left behind it
                written += os.pwrite(self._descriptor, memoryview(frame)[written:], self._end + written)
        chunk = StoredChunk(self, self._end, len(frame), len(data))
        self._end += len(frame)
        return chunk

    def read(self, offset: int, stored: int) -> bytes:
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
        with self._lock:
            self._references += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._references -= 1
            is_last = self._references == 0
        if is_last:
            os.close(self._descriptor)
            os.unlink(self.path)


def pieces(values: Iterable[bytes]) -> Iterator[bytes]:
    """Values joined to pieces of a size that is worth a read."""
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
