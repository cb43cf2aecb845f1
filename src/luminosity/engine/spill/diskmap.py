"""Data that is looked up by key beyond the memory budget: a map on disk, and cells of user state that move there."""

from __future__ import annotations

import contextlib
import marshal
import os
import sqlite3
import threading
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from luminosity.engine.spill import files
from luminosity.engine.spill.quota import Ledger

__all__ = ["Cell", "Cells", "DiskMap", "MappedChunk"]

_CELL_OVERHEAD = 400  # bytes that Python needs for a cell besides its data
_CHUNK_OVERHEAD = 56  # bytes that Python needs for a chunk besides its data


class MappedChunk(NamedTuple):
    """One part of the value of a key, as a chunk that is read when it is needed."""

    map: DiskMap
    key: bytes
    number: int
    size: int

    def read(self) -> bytes:
        """Return the data."""
        return self.map.read(self.key, self.number)


class DiskMap:
    """Maps bytes to bytes, with each value in parts. Any thread may use it. Owns its file, which ``close`` removes."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder = folder
        self._path = os.path.join(folder, f"{name}.sqlite")
        self._lock = threading.Lock()
        with self._explain_errors():
            self._rows = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            # The data does not outlive the run, so it need not survive a crash.
            self._rows.execute("PRAGMA journal_mode = OFF")
            self._rows.execute("PRAGMA synchronous = OFF")
            self._rows.execute(
                "CREATE TABLE parts (key BLOB, number INTEGER, count INTEGER, size INTEGER, data BLOB, "
                "PRIMARY KEY (key, number)) WITHOUT ROWID"
            )

    def put(self, entries: Iterable[tuple[bytes, int, Iterable[bytes]]]) -> None:
        """Write entries: each has a key, a number that the caller chooses, and its value in parts."""
        with self._lock, self._explain_errors():
            self._rows.execute("BEGIN")
            self._rows.executemany("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?)", _rows(entries))
            self._rows.execute("COMMIT")

    def remove(self, key: bytes) -> None:
        """Remove a key and its value."""
        with self._lock, self._explain_errors():
            self._rows.execute("DELETE FROM parts WHERE key = ?", (key,))

    def parts(self, key: bytes) -> list[MappedChunk]:
        """Return the parts of a value, without reading their data. Empty if there is no such key."""
        with self._lock:
            rows = self._rows.execute("SELECT number, size FROM parts WHERE key = ? ORDER BY number", (key,))
            return [MappedChunk(self, key, number, size) for number, size in rows]

    def read(self, key: bytes, number: int) -> bytes:
        """Return the data of one part."""
        with self._lock:
            query = self._rows.execute("SELECT data FROM parts WHERE key = ? AND number = ?", (key, number))
            (data,) = query.fetchone()
        return files.unpack(data)

    def with_prefix(self, prefix: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield all keys that begin with ``prefix``, in order, each with the number that was chosen for it."""
        last, comparison = prefix, ">="
        while True:
            with self._lock:
                query = self._rows.execute(
                    f"SELECT key, count FROM parts WHERE key {comparison} ? AND number = 0 ORDER BY key LIMIT 1000",
                    (last,),
                )
                rows: list[tuple[bytes, int]] = query.fetchall()
            for key, count in rows:
                if not key.startswith(prefix):
                    return
                yield key, count
            if not rows:
                return
            last, comparison = rows[-1][0], ">"

    def close(self) -> None:
        """Remove the file."""
        with self._lock:
            self._rows.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    @contextlib.contextmanager
    def _explain_errors(self) -> Generator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise files.disk_full(self._folder, f" (SQLite: {error})") from error


def _rows(entries: Iterable[tuple[bytes, int, Iterable[bytes]]]) -> Iterator[tuple[bytes, int, int, int, bytes]]:
    for key, count, parts in entries:
        for number, part in enumerate(parts):
            yield key, number, count, len(part), files.pack(part)


# A list of chunks (bag) or of (sort key, encoded entry) pairs (ordered list).
Cell = list[Any]


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
