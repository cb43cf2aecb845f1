"""A map on disk, for what must be found again by its key: state and side inputs beyond the budget."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

from luminosity.engine.spill import frames
from luminosity.errors import SpillFailed


class Part(NamedTuple):
    """One piece of the value of a key."""

    map: DiskMap
    key: bytes
    number: int
    size: int

    def read(self) -> bytes:
        return self.map.read(self.key, self.number)


class DiskMap:
    """Bytes to bytes, the value in parts. May be used from any thread; a file of its own, gone with ``close``."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder = folder
        self._path = os.path.join(folder, f"{name}.sqlite")
        self._lock = threading.Lock()
        with self._clear_errors():
            self._rows = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            # Nothing here outlives the run, so nothing needs to survive a crash.
            self._rows.execute("PRAGMA journal_mode = OFF")
            self._rows.execute("PRAGMA synchronous = OFF")
            self._rows.execute(
                "CREATE TABLE parts (key BLOB, number INTEGER, count INTEGER, size INTEGER, data BLOB, "
                "PRIMARY KEY (key, number)) WITHOUT ROWID"
            )

    def put(self, entries: Iterable[tuple[bytes, int, Iterable[bytes]]]) -> None:
        """Write keys, each with a number of its owner's choice and its value in parts."""
        with self._lock, self._clear_errors():
            self._rows.execute("BEGIN")
            self._rows.executemany("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?)", _rows(entries))
            self._rows.execute("COMMIT")

    def remove(self, key: bytes) -> None:
        with self._lock, self._clear_errors():
            self._rows.execute("DELETE FROM parts WHERE key = ?", (key,))

    def parts(self, key: bytes) -> list[Part]:
        with self._lock:
            rows = self._rows.execute("SELECT number, size FROM parts WHERE key = ? ORDER BY number", (key,))
            return [Part(self, key, number, size) for number, size in rows]

    def read(self, key: bytes, number: int) -> bytes:
        with self._lock:
            query = self._rows.execute("SELECT data FROM parts WHERE key = ? AND number = ?", (key, number))
            (data,) = query.fetchone()
        return frames.unpack(data)

    def with_prefix(self, prefix: bytes) -> Iterator[tuple[bytes, int]]:
        """All keys that begin with ``prefix``, in order, each with its number."""
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
        with self._lock:
            self._rows.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    @contextlib.contextmanager
    def _clear_errors(self) -> Generator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise SpillFailed(f"{frames.disk_full_message(self._folder)} (SQLite: {error})") from error


def _rows(entries: Iterable[tuple[bytes, int, Iterable[bytes]]]) -> Iterator[tuple[bytes, int, int, int, bytes]]:
    for key, count, parts in entries:
        for number, part in enumerate(parts):
            yield key, number, count, len(part), frames.pack(part)
