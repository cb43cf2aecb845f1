"""Side inputs: the whole of a buffer, looked up by window and key."""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.spill.diskmap import DiskMap
from luminosity.engine.spill.files import Chunk, MemoryChunk, SpillFile, pieces
from luminosity.engine.spill.quota import Ledger
from luminosity.engine.spill.table import GroupTable
from luminosity.errors import RunCancelled

_LENGTH = struct.Struct(">i")
_WINDOW = struct.Struct("<I")
_BYTES_PER_INDEXED_BYTE = 4  # what an index in memory takes: its objects besides the data
_TABLE_PART = 8  # of the budget, what an index that goes to disk may hold while it is made
_numbers = itertools.count(1)


class SideInputData:
    """Collects a buffer's blocks and indexes them when they are first asked for.

    One serves every step that has the buffer as a side input. ``read`` is called on the server's threads, once the
    buffer is complete; an index that has no room in memory is made on disk.
    """

    def __init__(self, codec: ElementCodec, folder: str, ledger: Ledger) -> None:
        self._codec = codec
        self._folder = folder
        self._ledger = ledger
        self.blocks: list[Block] = []
        self._lock = threading.Lock()
        self._values: dict[bytes, list[Chunk]] | None = None
        self._multimap: _Multimap | None = None
        self._listings: dict[tuple[str, bytes], list[Chunk]] = {}
        self._file: SpillFile | None = None
        self._held = 0
        self._is_over = False

    def add(self, block: Block) -> None:
        self.blocks.append(block)

    def spill(self, store: BlockStore, wanted: int) -> int:
        """Move blocks to disk; not while they are being indexed."""
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            return store.spill(self.blocks, wanted)
        finally:
            self._lock.release()

    def data(self) -> Iterator[bytes]:
        """All its elements, encoded, a block at a time."""
        return (block.data() for block in self.blocks)

    def release(self) -> None:
        self._is_over = True  # whoever is making an index, which may take long, gives up
        with self._lock:
            for block in self.blocks:
                block.release()
            self.blocks.clear()
            if self._multimap is not None:
                self._multimap.release()
            self._forget()

    def read(self, state_key: beam_fn_api_pb2.StateKey) -> Sequence[Chunk]:
        """The chunks of what ``state_key`` names."""
        kind = state_key.WhichOneof("type")
        with self._lock:
            self._go_on()
            if kind == "iterable_side_input":
                if self._values is None:
                    self._values = self._by_window()
                return self._values.get(state_key.iterable_side_input.window, [])
            asked = getattr(state_key, str(kind))
            if self._multimap is None:
                self._multimap = self._by_window_and_key()
            if kind == "multimap_side_input":
                return self._multimap.values(asked.window, asked.key)
            listing = str(kind), bytes(asked.window)
            if listing not in self._listings:  # made once: a worker asks for it page by page
                entries = self._multimap.entries(asked.window)
                keys_alone = kind == "multimap_keys_side_input"
                listed = (part for key, count, values in entries for part in _listed(keys_alone, key, count, values))
                self._listings[listing] = list(map(self._keep, pieces(listed)))
            return self._listings[listing]

    def _by_window(self) -> dict[bytes, list[Chunk]]:
        found: dict[bytes, list[Chunk]] = {}
        try:
            for block in self.blocks:
                by_window: dict[bytes, list[bytes]] = {}
                for window, value in self._elements(block):
                    by_window.setdefault(window, []).append(value)
                for window, values in by_window.items():
                    found.setdefault(window, []).append(self._keep(b"".join(values)))
        except BaseException:
            if self._multimap is None:
                self._forget()  # who asks again starts anew
            raise
        return found

    def _by_window_and_key(self) -> _Multimap:
        size = _BYTES_PER_INDEXED_BYTE * sum(block.size for block in self.blocks)
        multimap = _MemoryMultimap() if self._hold(size) else _DiskMultimap(self._folder, self._ledger, self._go_on)
        try:
            for block in self.blocks:
                multimap.add((window, *self._codec.key_and_value(value)) for window, value in self._elements(block))
            multimap.finish()
        except BaseException:
            multimap.release()
            raise
        return multimap

    def _go_on(self) -> None:
        if self._is_over:
            raise RunCancelled("the run is over")

    def _forget(self) -> None:
        if self._file is not None:
            self._file.release()
            self._file = None
        self._ledger.free(self._held)
        self._held = 0

    def _elements(self, block: Block) -> Iterator[tuple[bytes, bytes]]:
        self._go_on()
        for header, value in self._codec.elements(block.data()):
            for window in header.windows:
                yield self._codec.encode_window(window), value

    def _hold(self, size: int) -> bool:
        has_room = self._ledger.try_hold(size)
        self._held += size if has_room else 0
        return has_room

    def _keep(self, data: bytes) -> Chunk:
        if self._hold(len(data)):
            return MemoryChunk(data)
        if self._file is None:
            self._file = SpillFile(self._folder)
        self._ledger.add_spilled(len(data))
        return self._file.append(data)


class _Multimap(Protocol):
    def add(self, elements: Iterable[tuple[bytes, bytes, bytes]]) -> None:
        """Add (window, key, value) triples."""
        ...

    def finish(self) -> None: ...

    def values(self, window: bytes, key: bytes) -> list[Chunk]: ...

    def entries(self, window: bytes) -> Iterator[tuple[bytes, int, Iterable[bytes]]]:
        """The window's keys, each with the number of its values and the values."""
        ...

    def release(self) -> None: ...


class _MemoryMultimap:
    def __init__(self) -> None:
        self._windows: dict[bytes, dict[bytes, list[bytes]]] = {}
        self._counts: dict[tuple[bytes, bytes], int] = {}  # of values, where they were joined

    def add(self, elements: Iterable[tuple[bytes, bytes, bytes]]) -> None:
        for window, key, value in elements:
            self._windows.setdefault(window, {}).setdefault(key, []).append(value)

    def finish(self) -> None:
        for window, keys in self._windows.items():
            for key, values in keys.items():
                if len(values) > 1:
                    self._counts[window, key] = len(values)
                    values[:] = pieces(values)  # once: they are read page by page

    def values(self, window: bytes, key: bytes) -> list[Chunk]:
        return list(map(MemoryChunk, self._windows.get(window, {}).get(key, ())))

    def entries(self, window: bytes) -> Iterator[tuple[bytes, int, Iterable[bytes]]]:
        for key, values in self._windows.get(window, {}).items():
            yield key, self._counts.get((window, key), len(values)), values

    def release(self) -> None:
        self._windows.clear()


class _DiskMultimap:
    """Grouped by sorting, then written in order. An id is the window, after its length, and the key."""

    def __init__(self, folder: str, ledger: Ledger, go_on: Callable[[], None]) -> None:
        self._go_on = go_on  # called now and then; raises when it is no longer wanted
        self._table = GroupTable(folder, ledger)
        self._most_in_table = ledger.limit // _TABLE_PART
        self._map = DiskMap(folder, f"side-input{next(_numbers)}")

    def add(self, elements: Iterable[tuple[bytes, bytes, bytes]]) -> None:
        self._table.add_all((_prefix(window) + key, value) for window, key, value in elements)
        if self._table.memory_bytes > self._most_in_table:
            self._table.spill(self._table.memory_bytes)

    def finish(self) -> None:
        self._map.put(self._taken())

    def _taken(self) -> Iterator[tuple[bytes, int, Iterable[bytes]]]:
        for entry in self._table.take():
            self._go_on()
            yield entry.id, entry.count, entry.read()

    def values(self, window: bytes, key: bytes) -> list[Chunk]:
        return list(self._map.parts(_prefix(window) + key))

    def entries(self, window: bytes) -> Iterator[tuple[bytes, int, Iterable[bytes]]]:
        prefix = _prefix(window)
        for found, count in self._map.with_prefix(prefix):
            self._go_on()
            yield found[len(prefix) :], count, (part.read() for part in self._map.parts(found))

    def release(self) -> None:
        self._table.release()
        self._map.close()


def _prefix(window: bytes) -> bytes:
    return _WINDOW.pack(len(window)) + window


def _listed(keys_alone: bool, key: bytes, count: int, values: Iterable[bytes]) -> Iterator[bytes]:
    yield key
    if not keys_alone:
        yield _LENGTH.pack(count)
        yield from values
