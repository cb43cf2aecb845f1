"""Values by group: in memory while there is room, otherwise in sorted runs on disk, which are merged."""

from __future__ import annotations

import functools
import heapq
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Protocol

from luminosity.engine.spill.files import Chunk, MemoryChunk, SpillFile, StoredChunk, pieces

__all__ = ["LARGE_BYTES", "Entry", "GroupTable", "Held"]

LARGE_BYTES = 64 << 10  # a larger group has its own frames, which are read only when needed
_FRAME_BYTES = 256 << 10  # of small groups: compresses well, and a merge of many runs holds one frame of each
_RECORD = struct.Struct("<IqQII")  # bytes of the id, time, number of values, number of own frames, bytes of values here
_CHUNK = struct.Struct("<QQQ")  # offset, stored, size
_VALUE_OVERHEAD = 56  # bytes that Python needs for a value besides its data
_GROUP_OVERHEAD = 250  # bytes that Python needs for a group besides its id
_MOST_RUNS = 64  # more are merged into one: a merge holds an open file and a frame of each
_FREE_STEP = 1 << 20  # bytes: the ledger is updated in steps of this size, since it takes a lock


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

    def __init__(self, file: SpillFile, entries: Iterable[Entry]) -> None:
        """Take over a reference to ``file``, and write to its end."""
        self._file = file
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


class Held(Protocol):
    """Counts the memory that a table takes, such as :class:`.Ledger`."""

    def hold(self, size: int) -> None:
        """Count bytes that the table holds from now on."""
        ...

    def free(self, size: int) -> None:
        """Count bytes that the table holds no more."""
        ...

    def add_spilled(self, size: int) -> None:
        """Count bytes that were written to disk."""
        ...


class GroupTable:
    """Collects values by group id.

    Fill it, spill it as often as needed, then take all groups once. Only one thread at a time may use it. Owns its
    files until :meth:`release`.
    """

    def __init__(
        self, new_file: Callable[[], SpillFile], ledger: Held, combine_times: Callable[[int, int], int] = max
    ) -> None:
        """``new_file`` returns a reference to a file, which may be another one each time."""
        self._new_file = new_file
        self._ledger = ledger
        self._combine_times = combine_times
        self._values: dict[bytes, list[bytes]] = {}
        self._times: dict[bytes, int] = {}
        self._runs: list[SortedRun] = []
        self._overflow: SpillFile | None = None
        self.memory_bytes = 0
        self.values_in = 0
        self.values_out = 0

    def add_all(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """Add pairs of group id and encoded value."""
        values = self._values
        size = count = 0
        for group_id, value in pairs:
            count += 1
            if (known := values.get(group_id)) is None:
                values[group_id] = [value]
                size += len(group_id) + _GROUP_OVERHEAD
            else:
                known.append(value)
            size += len(value) + _VALUE_OVERHEAD
        self.memory_bytes += size
        self.values_in += count
        self._ledger.hold(size)

    def add_time(self, group_id: bytes, time: int) -> None:
        """Combine ``time`` with the group's time."""
        known = self._times.get(group_id)
        self._times[group_id] = time if known is None else self._combine_times(known, time)

    def spill(self, wanted: int) -> int:
        """Move groups to disk until ``wanted`` bytes are free. Returns how many were freed."""
        before = self.memory_bytes
        moved: list[tuple[bytes, list[bytes]]] = []
        while self._values and before - self.memory_bytes < wanted:
            moved.append(self._values.popitem())
            self.memory_bytes -= _bytes(*moved[-1])
        if moved:
            moved.sort(reverse=True)  # popped from its end, so that written groups are freed
            run = SortedRun(self._new_file(), self._popped(moved))
            self._runs.append(run)
            self._ledger.add_spilled(run.size)
        freed = before - self.memory_bytes
        self._ledger.free(freed)
        if len(self._runs) > _MOST_RUNS:
            self._merge_runs()
        return freed

    def _popped(self, groups: list[tuple[bytes, list[bytes]]]) -> Iterator[Entry]:
        while groups:
            yield self._entry(*groups.pop())

    def _entry(self, group_id: bytes, values: list[bytes]) -> Entry:
        chunks: list[Chunk] = [MemoryChunk(values[0])] if len(values) == 1 else list(map(MemoryChunk, pieces(values)))
        return Entry(group_id, self._times.pop(group_id, 0), len(values), chunks)

    def _merge_runs(self) -> None:
        merged = SortedRun(self._new_file(), merge(self._runs, self._combine_times))
        for run in self._runs:
            run.release()
        self._runs = [merged]

    def take(self, *, in_order: bool = False) -> Iterator[Entry]:
        """Yield all groups and remove them. Large groups that were spilled are not read, but referred to.

        With ``in_order`` the groups come in the order of their ids, whatever was spilled. This sorts the ids first.
        """
        if self._runs:
            self.spill(self.memory_bytes)
        elif in_order:  # what is spilled in the meantime are the last groups of the dictionary
            self._values = {group_id: self._values[group_id] for group_id in sorted(self._values)}
        freed = 0
        for group_id in list(self._values):  # in the order of their arrival, or sorted
            if (values := self._values.pop(group_id, None)) is None:
                break  # the rest was spilled in the meantime
            size = _bytes(group_id, values)
            self.memory_bytes -= size
            freed += size
            self.values_out += len(values)
            yield self._entry(group_id, values)
            if freed >= _FREE_STEP:
                self._ledger.free(freed)
                freed = 0
        self._ledger.free(freed)
        for entry in merge(self._runs, self._combine_times):
            self.values_out += entry.count
            yield self._on_disk(entry) if entry.size > LARGE_BYTES else entry
        self.release()

    def take_values(self) -> Iterator[tuple[bytes, int, list[bytes]]] | None:
        """Remove all groups, and yield the id, the time and the values of each. None if some were spilled.

        Quicker than :meth:`take` if groups are small. The table must not be spilled until all are taken.
        """
        return None if self._runs else self._popped_values()

    def _popped_values(self) -> Iterator[tuple[bytes, int, list[bytes]]]:
        times, values = self._times, self._values
        while values:
            group_id, group = values.popitem()
            yield group_id, times.pop(group_id, 0) if times else 0, group
        self.release()

    def _on_disk(self, entry: Entry) -> Entry:
        """Write the chunks of a large group that are in memory to disk, since there may be many small ones."""
        if sum(chunk.size for chunk in entry.chunks if isinstance(chunk, MemoryChunk)) <= LARGE_BYTES:
            return entry
        if self._overflow is None:
            self._overflow = self._new_file()
        chunks: list[Chunk] = []
        for is_small, same in itertools.groupby(entry.chunks, key=lambda chunk: isinstance(chunk, MemoryChunk)):
            some = list(same)
            chunks += map(self._overflow.append, pieces(chunk.read() for chunk in some)) if is_small else some
        return replace(entry, chunks=chunks)

    def release(self) -> None:
        """Drop all groups and files."""
        for run in self._runs:
            run.release()
        self._runs.clear()
        if self._overflow is not None:
            self._overflow.release()
            self._overflow = None
        self._values.clear()
        self._ledger.free(self.memory_bytes)
        self.memory_bytes = 0


def _bytes(group_id: bytes, values: list[bytes]) -> int:
    return len(group_id) + _GROUP_OVERHEAD + sum(map(len, values)) + _VALUE_OVERHEAD * len(values)
