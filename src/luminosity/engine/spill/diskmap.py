"""A map on disk, for data that is looked up by key: state and side inputs beyond the memory budget."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

from luminosity.engine.spill import frames

__all__ = ["DiskMap", "MappedChunk"]


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
        return frames.unpack(data)

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
            raise frames.disk_full(self._folder, f" (SQLite: {error})") from error


def _rows(entries: Iterable[tuple[bytes, int, Iterable[bytes]]]) -> Iterator[tuple[bytes, int, int, int, bytes]]:
    for key, count, parts in entries:
        for number, part in enumerate(parts):
            yield key, number, count, len(part), frames.pack(part)
