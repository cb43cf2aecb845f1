"""Sorted runs: files of groups of values in the order of their ids, and how to merge them."""

from __future__ import annotations

import functools
import heapq
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from luminosity.engine.spill.files import Chunk, MemoryChunk, SpillFile, StoredChunk, pieces

__all__ = ["LARGE_BYTES", "Entry", "SortedRun", "merge"]

LARGE_BYTES = 64 << 10  # a larger group has its own frames, which are read only when needed

_FRAME_BYTES = 256 << 10  # of small groups: compresses well, and a merge of many runs holds one frame of each
_RECORD = struct.Struct("<IqQII")  # bytes of the id, time, number of values, number of own frames, bytes of values here
_CHUNK = struct.Struct("<QQQ")  # offset, stored, size


@dataclass(frozen=True, slots=True)
class Entry:
    """Some encoded values of one group, one after the other in ``chunks``."""

    id: bytes
    time: int
    count: int
    chunks: list[Chunk]

    @property
    def size(self) -> int:
        """The bytes of all values."""
        return sum(chunk.size for chunk in self.chunks)

    def read(self) -> Iterator[bytes]:
        """Yield the data of the chunks."""
        return (chunk.read() for chunk in self.chunks)


class SortedRun:
    """Entries on disk, in the order of their ids.

    The constructor writes them. The owner calls :meth:`release` once; the file lives as long as its chunks are used.
    """

    def __init__(self, folder: str, entries: Iterable[Entry]) -> None:
        self._file = SpillFile(folder)
        self._frames: list[StoredChunk] = []
        self.size = 0
        try:
            self._write(entries)
        except BaseException:
            self._file.release()
            raise

    def _write(self, entries: Iterable[Entry]) -> None:
        frame: list[bytes] = []
        frame_bytes = 0
        for entry in entries:
            size = entry.size
            self.size += size
            if size > LARGE_BYTES:
                own = [self._file.append(piece) for piece in pieces(entry.read())]
                body = [_CHUNK.pack(chunk.offset, chunk.stored, chunk.size) for chunk in own]
                record = _RECORD.pack(len(entry.id), entry.time, entry.count, len(own), 0)
            else:
                body = list(entry.read())
                record = _RECORD.pack(len(entry.id), entry.time, entry.count, 0, size)
            frame += (record, entry.id, *body)
            frame_bytes += len(record) + len(entry.id) + sum(map(len, body))
            if frame_bytes >= _FRAME_BYTES:
                self._frames.append(self._file.append(b"".join(frame)))
                frame, frame_bytes = [], 0
        if frame:
            self._frames.append(self._file.append(b"".join(frame)))

    def entries(self) -> Iterator[Entry]:
        """Yield the entries. Values of large groups are not read, but referred to."""
        for frame in self._frames:
            data = frame.read()
            position = 0
            while position < len(data):
                id_bytes, time, count, own, here = _RECORD.unpack_from(data, position)
                position += _RECORD.size
                group_id = data[position : position + id_bytes]
                position += id_bytes
                chunks: list[Chunk] = []
                for _ in range(own):
                    chunks.append(StoredChunk(self._file, *_CHUNK.unpack_from(data, position)))
                    position += _CHUNK.size
                if not own:
                    chunks.append(MemoryChunk(data[position : position + here]))
                    position += here
                yield Entry(group_id, time, count, chunks)

    def release(self) -> None:
        """Drop the run's reference to its file."""
        self._file.release()


def merge(runs: Iterable[SortedRun], combine_times: Callable[[int, int], int]) -> Iterator[Entry]:
    """Yield one entry per id, with the values in the order of the runs."""
    by_id = attrgetter("id")
    merged = heapq.merge(*(run.entries() for run in runs), key=by_id)
    for group_id, same in itertools.groupby(merged, key=by_id):
        entries = list(same)
        if len(entries) == 1:
            yield entries[0]
            continue
        time = functools.reduce(combine_times, (entry.time for entry in entries))
        chunks = [chunk for entry in entries for chunk in entry.chunks]
        yield Entry(group_id, time, sum(entry.count for entry in entries), chunks)
