"""Values by group: in memory while there is room, otherwise in sorted runs on disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from luminosity.engine.spill.files import Chunk, MemoryChunk, SpillFile, pieces
from luminosity.engine.spill.quota import Ledger
from luminosity.engine.spill.sorted_runs import LARGE_BYTES, Entry, SortedRun, merge

__all__ = ["GroupTable"]

_VALUE_OVERHEAD = 56  # bytes that Python needs for a value besides its data
_GROUP_OVERHEAD = 250  # bytes that Python needs for a group besides its id
_MOST_RUNS = 64  # more are merged into one: a merge holds an open file and a frame of each
_FREE_STEP = 1 << 20  # bytes: the ledger is updated in steps of this size, since it takes a lock


class GroupTable:
    """Collects values by group id.

    Fill it, spill it as often as needed, then take all groups once. Only one thread at a time may use it. Owns its
    files until :meth:`release`.
    """

    def __init__(self, folder: str, ledger: Ledger, combine_times: Callable[[int, int], int] = max) -> None:
        self._folder = folder
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
            run = SortedRun(self._folder, self._popped(moved))
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
        merged = SortedRun(self._folder, merge(self._runs, self._combine_times))
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

    def _on_disk(self, entry: Entry) -> Entry:
        """Write the chunks of a large group that are in memory to disk, since there may be many small ones."""
        if sum(chunk.size for chunk in entry.chunks if isinstance(chunk, MemoryChunk)) <= LARGE_BYTES:
            return entry
        if self._overflow is None:
            self._overflow = SpillFile(self._folder)
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
