"""The values of open windows: in memory while there is room, otherwise on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from luminosity.engine.spill.files import Chunk, MemoryChunk, SpillFile, StoredChunk, pieces
from luminosity.engine.spill.table import LARGE_BYTES

__all__ = ["ENTRY_BYTES", "Mark", "PaneValues", "spill_values"]

ENTRY_BYTES = 600  # that Python needs for a key in a window besides its values
_VALUE_OVERHEAD = 56  # bytes that Python needs for a value besides its data
_LEAST_SPILLED = 1 << 10  # bytes: the reference to spilled values takes up to a quarter of this
_FRAME_BYTES = 256 << 10  # of small entries: compresses well, and each file keeps one frame in memory


class Mark(NamedTuple):
    """A place in the values of an entry: what was there before it, and what came later."""

    chunks: int  # on disk
    in_memory: int  # items of ``values``
    size: int  # bytes of both


class PaneValues:
    """Encoded values of a key in a window, in any order. Only the loop's thread changes it."""

    __slots__ = ("_files", "_stored", "_stored_count", "data_bytes", "values")

    def __init__(self) -> None:
        self.values: list[bytes] = []  # in memory; after a restart, an item may be several values
        self.data_bytes = 0  # of the values in memory
        self._stored: list[Chunk] = []
        self._stored_count = 0  # of the values besides one for each item of ``values``
        self._files: list[SpillFile] = []

    def __len__(self) -> int:
        return self._stored_count + len(self.values)

    @property
    def memory_bytes(self) -> int:
        """How much memory the values take."""
        return self.data_bytes + _VALUE_OVERHEAD * len(self.values)

    @property
    def size(self) -> int:
        """The bytes of all values, in memory and on disk."""
        return self.data_bytes + (sum(chunk.size for chunk in self._stored) if self._stored else 0)

    def append(self, value: bytes) -> int:
        """Add a value. Returns how much memory it takes."""
        self.values.append(value)
        self.data_bytes += len(value)
        return len(value) + _VALUE_OVERHEAD

    def append_joined(self, data: bytes, count: int) -> int:
        """Add several values, one after the other in ``data``. Returns how much memory they take."""
        self._stored_count += count - 1
        return self.append(data)

    @property
    def is_on_disk(self) -> bool:
        """Whether some values are on disk."""
        return bool(self._stored)

    def mark(self) -> Mark:
        """Return the place behind the last value."""
        return Mark(len(self._stored), len(self.values), self.size)

    def since(self, mark: Mark | None) -> list[bytes]:
        """Return the values that were added behind a mark, to be joined. Reads them if they are on disk by now."""
        chunks, in_memory, size = mark or (0, 0, 0)
        if len(self._stored) == chunks:
            return self.values[in_memory:]
        parts: list[bytes] = []
        for chunk in self._stored:  # all values from before the mark are on disk, and those on disk come first
            if chunk.size > size:
                parts.append(chunk.read()[size:])
            size = max(0, size - chunk.size)
        return [*parts, *self.values]

    def extend(self, other: PaneValues) -> None:
        """Add the values of ``other``. Takes them over."""
        self._stored += other._stored
        self._stored_count += other._stored_count
        self._files += other._files
        self.values += other.values
        self.data_bytes += other.data_bytes

    def copy(self) -> PaneValues:
        """Return the same values, to be released on their own."""
        copied = PaneValues()
        copied.values = list(self.values)
        copied.data_bytes = self.data_bytes
        copied._stored = list(self._stored)
        copied._stored_count = self._stored_count
        copied._files = [file.share() for file in self._files]
        return copied

    def chunks(self) -> list[Chunk]:
        """Return all values, one after the other, in chunks."""
        return [*self._stored, *map(MemoryChunk, pieces(self.values))]

    def parts(self) -> list[bytes]:
        """Return all values as bytes to be joined."""
        return [*(chunk.read() for chunk in self._stored), *self.values] if self._stored else self.values

    def release(self) -> None:
        """Drop the values."""
        for file in self._files:
            file.release()
        self._files.clear()
        self._stored.clear()
        self.values.clear()
        self.data_bytes = self._stored_count = 0

    def moved(self, chunks: Iterable[Chunk], file: SpillFile) -> int:
        """Replace the values in memory by ``chunks`` on disk. Returns how much memory this frees."""
        freed = self.memory_bytes
        self._stored += chunks
        self._stored_count += len(self.values)
        self._files.append(file.share())
        self.values, self.data_bytes = [], 0
        return freed


class _Frame:
    """A frame on disk that several entries share. The frame that was read last stays in memory, one for each file."""

    __slots__ = ("_cache", "_number", "chunk")

    def __init__(self, cache: dict[str, tuple[int, bytes]], number: int) -> None:
        self.chunk: StoredChunk | None = None  # until it is written
        self._cache = cache
        self._number = number

    def read(self) -> bytes:
        number, data = self._cache.get("last", (-1, b""))
        if number != self._number:
            assert self.chunk is not None
            data = self.chunk.read()
            self._cache["last"] = self._number, data
        return data


class _Span(NamedTuple):
    """The values of one entry in a frame, as a chunk."""

    frame: _Frame
    start: int
    size: int

    def read(self) -> bytes:
        """Read the values. Entries that are read in the order in which they were spilled read each frame once."""
        return self.frame.read()[self.start : self.start + self.size]


def spill_values(entries: Iterable[PaneValues], folder: str, wanted: int) -> tuple[int, int]:
    """Move the values of entries to one file, in this order, until ``wanted`` bytes are free.

    Entries with little data stay: a reference to it would take as much memory. Returns how many bytes of memory were
    freed, and how many were written.
    """
    file = SpillFile(folder)
    freed = written = 0
    try:
        for entry, chunks in _written(_worth_spilling(entries), file):
            written += entry.data_bytes
            freed += entry.moved(chunks, file)
            if freed >= wanted:
                break
    finally:
        file.release()
    return freed, written


def _worth_spilling(entries: Iterable[PaneValues]) -> Iterator[PaneValues]:
    return (entry for entry in entries if entry.memory_bytes >= _LEAST_SPILLED)


def _written(entries: Iterable[PaneValues], file: SpillFile) -> Iterator[tuple[PaneValues, list[Chunk]]]:
    """Write entries. Yields each entry with its chunks once they are on disk."""
    cache: dict[str, tuple[int, bytes]] = {}
    number = 0
    frame, data, size = _Frame(cache, number), list[bytes](), 0
    waiting: list[tuple[PaneValues, list[Chunk]]] = []
    for entry in entries:
        if entry.data_bytes > LARGE_BYTES:
            yield entry, [file.append(piece) for piece in pieces(entry.values)]
            continue
        waiting.append((entry, [_Span(frame, size, entry.data_bytes)]))
        data += entry.values
        size += entry.data_bytes
        if size >= _FRAME_BYTES:
            frame.chunk = file.append(b"".join(data))
            yield from waiting
            number += 1
            frame, data, size, waiting = _Frame(cache, number), [], 0, []
    if waiting:
        frame.chunk = file.append(b"".join(data))
        yield from waiting
