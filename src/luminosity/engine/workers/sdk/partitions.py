"""Groupings in workers: output that is split by key into partitions, and bundles that group one partition each."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from apache_beam.coders import coders
from apache_beam.coders.coder_impl import create_OutputStream

from luminosity.engine.data import wire
from luminosity.engine.data.group_rules import VALUES_LENGTH, Group, Rule, values_in_state
from luminosity.engine.spill import group_files
from luminosity.engine.spill.files import Chunk, MemoryChunk, SpillFile, StoredChunk, pieces
from luminosity.engine.spill.table import LARGE_BYTES, GroupTable
from luminosity.engine.workers.sdk.channel import BlockStream

__all__ = ["PartitionTable", "SplitOutput"]

_SPLIT_BYTES = 16 << 20  # of all partitions that a bundle collects, so that the blocks of each have some size
_LEAST_SPLIT_BYTES = 64 << 10  # of one partition
_LEAST_MEMORY = 64 << 10  # of a table: with less, it writes each block to disk
_INLINE_BYTES = LARGE_BYTES  # of a group: a larger one is read piece by piece, as those of the runner are


class SplitOutput:
    """Collects the output of a bundle for a grouping, each element in the partition of its key.

    The key's bytes are cut from the encoded element: if a coder writes equal keys in two ways, the runner, which splits
    other blocks, finds the same ones.
    """

    def __init__(self, windowed: Any, stream: BlockStream, partitions: int) -> None:
        key, value = windowed.wrapped_value_coder.coders()
        header = coders.WindowedValueCoder(coders.SingletonCoder(None), window_coder=windowed.window_coder)
        self._header: Any = header.get_impl().encode_to_stream
        self._key: Any = key.get_impl().encode_to_stream
        self._value: Any = value.get_impl().encode_to_stream
        self._stream = stream
        self._count = partitions
        self._most = max(_LEAST_SPLIT_BYTES, min(wire.BLOCK_BYTES, _SPLIT_BYTES // partitions))
        self._elements: list[list[bytes]] = [[] for _ in range(partitions)]
        self._sizes = [0] * partitions

    @classmethod
    def of(cls, windowed: Any, stream: Any, partitions: int) -> SplitOutput | None:
        """Return what splits the output of a bundle; None if it is not to be split, or no pairs are known."""
        if not partitions or not isinstance(stream, BlockStream) or not stream.splits:
            return None
        return cls(windowed, stream, partitions) if type(windowed.wrapped_value_coder) is coders.TupleCoder else None

    def add(self, windowed_value: Any) -> None:
        """Encode an element, and send the block of its partition if that is large enough."""
        key, value = windowed_value.value
        encoded = create_OutputStream()
        self._header(windowed_value, encoded, True)
        start = encoded.size()
        self._key(key, encoded, True)
        end = encoded.size()
        self._value(value, encoded, True)
        data = encoded.get()
        index = wire.key_hash(data[start:end]) % self._count
        self._elements[index].append(data)
        self._sizes[index] += len(data)
        if self._sizes[index] >= self._most:
            self._send(index)

    def _send(self, index: int) -> None:
        elements, self._elements[index] = self._elements[index], []
        self._sizes[index] = 0
        self._stream.add_block(len(elements), (b"".join(elements),), functools.partial(wire.in_partition, index))

    def flush(self) -> None:
        """Send what is left."""
        for index, elements in enumerate(self._elements):
            if elements:
                self._send(index)


class _Memory:
    """Counts the memory that one table takes."""

    def __init__(self) -> None:
        self.used = 0

    def hold(self, size: int) -> None:
        self.used += size

    def free(self, size: int) -> None:
        self.used -= size

    def add_spilled(self, size: int) -> None:
        """Do nothing: the runner counts what it holds itself."""


class PartitionTable:
    """Groups one partition, within some memory and beyond it in a file. Call :meth:`close` in the end."""

    def __init__(self, rule: Rule, stream: BlockStream, memory_part: int) -> None:
        """It takes up to 1/``memory_part`` of the memory budget."""
        assert stream.writer is not None
        self._rule = rule
        self._stream = stream
        self._writer = stream.writer
        self._most = max(_LEAST_MEMORY, self._writer.memory_budget // memory_part)
        self._memory = _Memory()
        self._file: SpillFile | None = None
        self._table = GroupTable(lambda: self._open().share(), self._memory, rule.combine_times)
        self._has_large = False

    def _open(self) -> SpillFile:
        """Return the file of all that is not in memory, which has one name: the runner takes it over as a whole."""
        if self._file is None:
            self._file = self._writer.new_file()
        return self._file

    def add(self, data: bytes) -> None:
        """Group encoded elements."""
        self._rule.add(self._table, data)
        if self._memory.used > self._most:
            self._table.spill(self._memory.used - self._most // 2)

    def send(self) -> None:
        """Send all groups. Large ones are written to the file, and sent last: then nothing can fail any more."""
        large: list[tuple[bytes, bytes, int]] = []
        self._begin_block()
        for start, count, values in self._groups():
            size = sum(map(len, values))
            if size > _INLINE_BYTES:
                large.append((start, self._store(map(MemoryChunk, pieces(values))), size))
            else:
                self._put(start, count, values, size)
        for group in self._other_groups():
            size = sum(chunk.size for chunk in group.chunks)
            if size > _INLINE_BYTES:
                large.append((group.start, self._store(group.chunks), size))
            else:
                self._put(group.start, group.count, [chunk.read() for chunk in group.chunks], size)
        self._send_block()
        if large and self._file is not None:
            self._file.keep()
        for start, token, size in large:
            wrap = functools.partial(wire.pack_group, token, size)
            self._stream.add_block(1, (start + values_in_state(token),), wrap)

    def _groups(self) -> Iterator[tuple[bytes, int, list[bytes]]]:
        """Yield the start, the number of values and the values of each group, if all are in memory and simple."""
        start_of = self._rule.start
        if not self._rule.is_simple or (found := self._table.take_values()) is None:
            return
        for group_id, time, values in found:
            yield start_of(group_id, time), len(values), values

    def _other_groups(self) -> Iterator[Group]:
        """Yield the groups that are left."""
        for entry in self._table.take():
            yield from self._rule.groups(entry)

    def _begin_block(self) -> None:
        self._parts: list[bytes] = []
        self._size = self._count = 0

    def _put(self, start: bytes, count: int, values: list[bytes], size: int) -> None:
        self._parts += (start, VALUES_LENGTH.pack(count), *values)
        self._size += len(start) + size
        self._count += 1
        if self._size >= wire.BLOCK_BYTES:
            self._send_block()

    def _send_block(self) -> None:
        if self._count:
            self._stream.add_block(self._count, self._parts)
        self._begin_block()

    def _store(self, chunks: Iterable[Chunk]) -> bytes:
        """Write the values of a group that are in memory to the file. Returns the token with which they are found."""
        file = self._open()
        stored: list[StoredChunk] = []
        waiting: list[bytes] = []
        for chunk in chunks:
            if isinstance(chunk, StoredChunk):
                stored += map(file.append, pieces(waiting))
                waiting = []
                stored.append(chunk)
            else:
                waiting.append(chunk.read())
        stored += map(file.append, pieces(waiting))
        return group_files.token_of(file, stored)

    def close(self) -> None:
        """Release everything but a file that the runner takes over."""
        self._table.release()
        if self._file is not None:
            self._file.release()
            self._file = None
