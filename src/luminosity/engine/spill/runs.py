"""Sorted runs: groups of values, by id, in a file; and how several are merged."""

from __future__ import annotations

import functools
import heapq
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from luminosity.engine.spill.files import Chunk, MemoryChunk, SpillFile, StoredChunk, pieces

LARGE_BYTES = 64 << 10  # groups beyond this are kept in frames of their own
_FRAME_BYTES = 256 << 10
_RECORD = struct.Struct("<IqQII")  # bytes of id, time, values, frames of its own, bytes of values here
_CHUNK = struct.Struct("<QQQ")  # offset, stored, size


@dataclass(frozen=True, slots=True)
class Entry:
    """Some values of one group, laid end to end in ``chunks``."""

    id: bytes
    time: int
    count: int
    chunks: list[Chunk]

    @property
    def size(self) -> int:
        return sum(chunk.size for chunk in self.chunks)

    def read(self) -> Iterator[bytes]:
        return (chunk.read() for chunk in self.chunks)


class SortedRun:
    """Entries in the order of their ids. Released once by whoever made it; its file lives while its chunks are used."""

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
        self._file.release()


def merge(runs: Iterable[SortedRun], combine_times: Callable[[int, int], int]) -> Iterator[Entry]:
    """One entry per id, its values in the order of the runs."""
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
