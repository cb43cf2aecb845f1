"""Cells of user state: in memory while there is room, otherwise the least recently written on disk."""

from __future__ import annotations

import marshal
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from luminosity.engine.spill.diskmap import DiskMap
from luminosity.engine.spill.quota import Ledger

__all__ = ["Cell", "Cells"]

# A list of chunks (bag) or of (sort key, encoded entry) pairs (ordered list).
Cell = list[Any]

_CELL_OVERHEAD = 400  # bytes that Python needs for a cell besides its data
_CHUNK_OVERHEAD = 56  # bytes that Python needs for a chunk besides its data


class Cells:
    """Cells by key. Only one thread at a time may use it: the caller holds a lock.

    Owns its file on disk, which :meth:`release` removes.
    """

    def __init__(self, folder: str, ledger: Ledger) -> None:
        self._folder = folder
        self._ledger = ledger
        self._memory: dict[bytes, Cell] = {}  # in the order in which they were last written
        self._groups: dict[Hashable, dict[bytes, None]] = {}  # the keys of each group's cells, also of those on disk
        self._disk: DiskMap | None = None
        self._on_disk = 0
        self.memory_bytes = 0

    def get(self, key: bytes) -> Cell:
        """Return a copy of a cell, empty if there is none."""
        if (cell := self._memory.get(key)) is not None:
            return list(cell)
        parts = self._disk.parts(key) if self._disk is not None and self._on_disk else []
        return marshal.loads(parts[0].read()) if parts else []

    def group(self, group: Hashable, max_bytes: int) -> tuple[dict[bytes, Cell], bool]:
        """Return cells of a group, up to ``max_bytes`` of data and only those in memory, and whether these are all."""
        found: dict[bytes, Cell] = {}
        size = 0
        for key in self._groups.get(group, ()):
            cell = self._memory.get(key)
            if cell is None or (size := size + _data_bytes(key, cell)) > max_bytes:
                return found, False
            found[key] = cell
        return found, True

    def put(self, cells: Mapping[bytes, Cell], group: Hashable = None) -> None:
        """Replace cells, which always belong to the same group. An empty cell is removed."""
        size = 0
        try:
            for key, cell in cells.items():
                if (old := self._memory.pop(key, None)) is not None:
                    size -= _bytes(key, old)
                elif self._disk is not None and self._on_disk and self._disk.parts(key):
                    self._disk.remove(key)
                    self._on_disk -= 1
                if cell:
                    self._memory[key] = cell
                    size += _bytes(key, cell)
                    self._groups.setdefault(group, {})[key] = None
                elif group in self._groups:
                    self._groups[group].pop(key, None)
        finally:
            self._count(size)

    def fill(self, cells: Mapping[bytes, Cell], group: Hashable) -> None:
        """Add cells of a group that are not empty, and were not there before. Quicker than :meth:`put`."""
        self._memory.update(cells)
        self._groups.setdefault(group, {}).update(dict.fromkeys(cells))
        size = sum(map(len, cells)) + (_CELL_OVERHEAD + _CHUNK_OVERHEAD) * len(cells)
        for cell in cells.values():
            chunk = cell[0]
            if len(cell) == 1 and type(chunk) is bytes:  # as most are
                size += len(chunk)
            else:
                size += _bytes(b"", cell) - _CELL_OVERHEAD - _CHUNK_OVERHEAD
        self._count(size)

    def items(self) -> Iterator[tuple[bytes, Cell]]:
        """Yield all cells, those in memory first."""
        yield from self._memory.items()
        if self._disk is not None:
            for key, _ in self._disk.with_prefix(b""):
                yield key, self.get(key)

    def spill(self, wanted: int) -> int:
        """Move the least recently written cells to disk until ``wanted`` bytes are free. Returns the bytes freed."""
        freed = 0
        moved: dict[bytes, Cell] = {}
        for key, cell in self._memory.items():
            if freed >= wanted:
                break
            moved[key] = cell
            freed += _bytes(key, cell)
        if not moved:
            return 0
        if self._disk is None:
            self._disk = DiskMap(self._folder, "state")
        # The data stays in this process's private folder, so the fastest format will do.
        self._disk.put((key, 0, (marshal.dumps(cell),)) for key, cell in moved.items())
        self._on_disk += len(moved)
        for key in moved:
            del self._memory[key]
        self._count(-freed)
        self._ledger.add_spilled(freed)
        return freed

    def release(self) -> None:
        """Drop all cells and remove the file."""
        self._memory.clear()
        self._groups.clear()
        self._count(-self.memory_bytes)
        if self._disk is not None:
            self._disk.close()
            self._disk = None

    def _count(self, size: int) -> None:
        self.memory_bytes += size
        self._ledger.hold(size)


def _bytes(key: bytes, cell: Cell) -> int:
    return _data_bytes(key, cell) + _CELL_OVERHEAD + _CHUNK_OVERHEAD * len(cell)


def _data_bytes(key: bytes, cell: Cell) -> int:
    if len(cell) == 1 and isinstance(cell[0], bytes):  # as most are
        return len(key) + len(cell[0])
    return len(key) + sum(len(chunk) if isinstance(chunk, bytes) else len(chunk[1]) for chunk in cell)
