"""Side inputs: all elements of a buffer, indexed by window and key."""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.utils.windowed_value import PaneInfoTiming

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.saved_rows import BlockRows, Changes, SavedRows
from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.spill.diskmap import DiskMap
from luminosity.engine.spill.files import Chunk, MemoryChunk, SpillFile, pieces
from luminosity.engine.spill.quota import Ledger
from luminosity.engine.spill.table import GroupTable
from luminosity.errors import RunCancelled

__all__ = ["SideInputData"]

_LENGTH = struct.Struct(">i")  # the number of a key's values, as Beam's iterable coder writes it
_WINDOW = struct.Struct("<I")
_BYTES_PER_INDEXED_BYTE = 4  # an index in memory takes about 4 times its data, because of Python's objects
_TABLE_PART = 8  # while an index on disk is built, it may take 1/8 of the memory budget
_numbers = itertools.count(1)


class SideInputData:
    """Collects a buffer's blocks and indexes them at the first read.

    One object serves all steps that have the buffer as a side input. The loop's thread adds blocks, spills and
    releases. The server's threads call :meth:`read` once the buffer is complete; the first read blocks while it builds
    the index. An index that does not fit into the memory budget is built on disk. Owns the blocks and the index.
    """

    def __init__(self, codec: ElementCodec, folder: str, ledger: Ledger) -> None:
        self._codec = codec
        self._folder = folder
        self._ledger = ledger
        self.blocks: list[Block] = []
        self._rows = BlockRows(b"")
        self._lock = threading.Lock()
        self._values: dict[bytes, list[Chunk]] | None = None
        self._multimap: _Multimap | None = None
        self._listings: dict[tuple[str, bytes], list[Chunk]] = {}
        self._file: SpillFile | None = None
        self._held = 0
        self._is_over = False

    def add(self, block: Block) -> None:
        """Add a block. Takes over the block."""
        self.blocks.append(block)

    def save(self, changes: Changes, owner: str) -> None:
        """Write the blocks that were added since the last checkpoint. The index is built again after a restart."""
        self._rows.save(self.blocks, changes, owner)

    def restore(self, saved: SavedRows, owner: str) -> None:
        """Take over the blocks that a checkpoint has. Call it once, before anything else."""
        for key, value in saved.rows(owner):
            self.blocks += self._rows.restore(key, value, saved)

    def spill(self, store: BlockStore, wanted: int) -> int:
        """Move blocks to disk. Does nothing while they are being indexed. Returns how many bytes were freed."""
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            return store.spill(self.blocks, wanted)
        finally:
            self._lock.release()

    def data(self) -> Iterator[bytes]:
        """Yield all encoded elements, one block at a time."""
        return (block.data() for block in self.blocks)

    def release(self) -> None:
        """Release the blocks and the index. Waits for a read in progress, which gives up soon."""
        self._is_over = True  # a thread that builds an index looks at this and raises
        with self._lock:
            for block in self.blocks:
                block.release()
            self.blocks.clear()
            if self._multimap is not None:
                self._multimap.release()
            self._forget()

    def read(self, state_key: beam_fn_api_pb2.StateKey) -> Sequence[Chunk]:
        """Return the chunks that ``state_key`` names."""
        kind = state_key.WhichOneof("type")
        with self._lock:
            self._check_running()
            if kind == "iterable_side_input":
                if self._values is None:
                    self._values = self._by_window()
                return self._values.get(state_key.iterable_side_input.window, [])
            requested = getattr(state_key, str(kind))
            if self._multimap is None:
                self._multimap = self._by_window_and_key()
            if kind == "multimap_side_input":
                return self._multimap.values(requested.window, requested.key)
            listing = str(kind), bytes(requested.window)
            if listing not in self._listings:  # built once, since a worker requests it page by page
                entries = self._multimap.entries(requested.window)
                keys_only = kind == "multimap_keys_side_input"
                listed = (part for key, count, values in entries for part in _listed(keys_only, key, count, values))
                self._listings[listing] = list(map(self._keep, pieces(listed)))
            return self._listings[listing]

    def of_last_pane(self) -> list[Chunk] | None:
        """Return the element of the last pane, if all elements are in one window and come from panes of one element."""
        last, elements_of_last = -1, list[bytes]()
        with self._lock:
            self._check_running()
            for block in self.blocks:
                for header, value in self._codec.elements(block.data()):
                    pane: Any = header.pane_info
                    if pane.timing == PaneInfoTiming.UNKNOWN:
                        return None  # it comes from no grouping
                    if pane.index > last:
                        last, elements_of_last = pane.index, []
                    if pane.index == last:
                        elements_of_last.append(value)
        return list(map(MemoryChunk, elements_of_last)) if len(elements_of_last) == 1 else None

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
                self._forget()  # the next read starts again
            raise
        return found

    def _by_window_and_key(self) -> _Multimap:
        size = _BYTES_PER_INDEXED_BYTE * sum(block.size for block in self.blocks)
        multimap = (
            _MemoryMultimap() if self._hold(size) else _DiskMultimap(self._folder, self._ledger, self._check_running)
        )
        try:
            for block in self.blocks:
                multimap.add((window, *self._codec.key_and_value(value)) for window, value in self._elements(block))
            multimap.finish()
        except BaseException:
            multimap.release()
            raise
        return multimap

    def _check_running(self) -> None:
        if self._is_over:
            raise RunCancelled("the run is over")

    def _forget(self) -> None:
        if self._file is not None:
            self._file.release()
            self._file = None
        self._ledger.free(self._held)
        self._held = 0

    def _elements(self, block: Block) -> Iterator[tuple[bytes, bytes]]:
        self._check_running()
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
        """Add tuples of window, key and value."""
        ...

    def finish(self) -> None:
        """Complete the index. Call it once, after the last element."""
        ...

    def values(self, window: bytes, key: bytes) -> list[Chunk]:
        """Return the values of a key."""
        ...

    def entries(self, window: bytes) -> Iterator[tuple[bytes, int, Iterable[bytes]]]:
        """Yield the keys of a window, each with the number of its values and the values."""
        ...

    def release(self) -> None:
        """Release all data."""
        ...


class _MemoryMultimap:
    def __init__(self) -> None:
        self._windows: dict[bytes, dict[bytes, list[bytes]]] = {}
        self._counts: dict[tuple[bytes, bytes], int] = {}  # of values that were joined

    def add(self, elements: Iterable[tuple[bytes, bytes, bytes]]) -> None:
        for window, key, value in elements:
            self._windows.setdefault(window, {}).setdefault(key, []).append(value)

    def finish(self) -> None:
        for window, keys in self._windows.items():
            for key, values in keys.items():
                if len(values) > 1:
                    self._counts[window, key] = len(values)
                    values[:] = pieces(values)  # joined once, since they are read page by page

    def values(self, window: bytes, key: bytes) -> list[Chunk]:
        return list(map(MemoryChunk, self._windows.get(window, {}).get(key, ())))

    def entries(self, window: bytes) -> Iterator[tuple[bytes, int, Iterable[bytes]]]:
        for key, values in self._windows.get(window, {}).items():
            yield key, self._counts.get((window, key), len(values)), values

    def release(self) -> None:
        self._windows.clear()


class _DiskMultimap:
    """Groups by sorting, then writes in order. An id is the window's length, the window and the key."""

    def __init__(self, folder: str, ledger: Ledger, check_running: Callable[[], None]) -> None:
        self._check_running = check_running  # called often; raises once the run is over
        self._table = GroupTable(partial(SpillFile, folder), ledger)
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
            self._check_running()
            yield entry.id, entry.count, entry.read()

    def values(self, window: bytes, key: bytes) -> list[Chunk]:
        return list(self._map.parts(_prefix(window) + key))

    def entries(self, window: bytes) -> Iterator[tuple[bytes, int, Iterable[bytes]]]:
        prefix = _prefix(window)
        for found, count in self._map.with_prefix(prefix):
            self._check_running()
            yield found[len(prefix) :], count, (part.read() for part in self._map.parts(found))

    def release(self) -> None:
        self._table.release()
        self._map.close()


def _prefix(window: bytes) -> bytes:
    return _WINDOW.pack(len(window)) + window


def _listed(keys_only: bool, key: bytes, count: int, values: Iterable[bytes]) -> Iterator[bytes]:
    yield key
    if not keys_only:
        yield _LENGTH.pack(count)
        yield from values
