"""The journal of what a server has in batches, in a file: a batch that was sent is found again after a restart."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from luminosity.errors import CacheError

__all__ = ["BatchJournal", "Begun", "Noted", "folder_of_checkpoint", "use_checkpoint"]

_FILE = "batches.sqlite"
_LONGEST_LOCK_S = 60.0  # another process writes for some milliseconds
_FORGET_S = 30 * 86400.0  # servers keep the answers of a batch for as long
_TABLES = """
CREATE TABLE IF NOT EXISTS batches (name TEXT PRIMARY KEY, id TEXT, began REAL);
CREATE TABLE IF NOT EXISTS lines (key BLOB PRIMARY KEY, name TEXT);
CREATE INDEX IF NOT EXISTS by_name ON lines (name);
"""


@dataclass
class Begun:
    """What is new among some requests, and the batches that have the others."""

    name: str
    """Of the new batch."""
    new: list[bytes] = field(default_factory=list[bytes])
    others: dict[bytes, str] = field(default_factory=dict[bytes, str])
    """The name of the batch that has a request already."""


@dataclass(frozen=True)
class Noted:
    """A batch in the file."""

    id: str | None
    """The server's name of it; None until the server has said it."""
    began: float
    """In seconds since 1970."""


_checkpoint: dict[str, str | None] = {"folder": None}


def use_checkpoint(folder: str | None) -> None:
    """Set the value of ``--checkpoint_dir`` for the models that this process loads from now on."""
    _checkpoint["folder"] = folder


def folder_of_checkpoint() -> str | None:
    """Return the folder for batches and their answers beside the run's checkpoint; None if it has no checkpoint."""
    folder = _checkpoint["folder"]
    return None if folder is None else f"{folder.rstrip(os.sep)}-batches"


class BatchJournal:
    """The batches that were sent and whose answers have not come. Any number of threads and processes may use it.

    A batch is in the file before its requests are sent, under a name that is sent along: if the process dies before it
    knows what the server has made of them, the next one asks the server for a batch of this name.
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, _FILE)
        self._lock = threading.Lock()
        with self._explained():
            os.makedirs(folder, 0o700, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self._database = sqlite3.connect(self._path, _LONGEST_LOCK_S, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")  # a batch costs money
            self._database.executescript(_TABLES)

    def begin(self, keys: Sequence[bytes]) -> Begun:
        """Note those requests that are in no batch as a new one, all or nothing."""
        begun = Begun(uuid.uuid4().hex)
        with self._turn():
            old = "SELECT name FROM batches WHERE began < ?"
            self._database.execute(f"DELETE FROM lines WHERE name IN ({old})", [time.time() - _FORGET_S])
            self._database.execute("DELETE FROM batches WHERE began < ?", [time.time() - _FORGET_S])
            for key in keys:
                found = self._database.execute("SELECT name FROM lines WHERE key = ?", [key]).fetchone()
                if found is not None:
                    begun.others[key] = found[0]
                    continue
                self._database.execute("INSERT INTO lines VALUES (?, ?)", [key, begun.name])
                begun.new.append(key)
            if begun.new:
                self._database.execute("INSERT INTO batches VALUES (?, NULL, ?)", [begun.name, time.time()])
        return begun

    def sent(self, name: str, batch_id: str) -> None:
        """Note the server's name of a batch."""
        with self._turn():
            self._database.execute("UPDATE batches SET id = ? WHERE name = ?", [batch_id, name])

    def find(self, name: str) -> Noted | None:
        """Return what is known about a batch; None if it has ended."""
        with self._explained(), self._lock:
            found = self._database.execute("SELECT id, began FROM batches WHERE name = ?", [name]).fetchone()
        return None if found is None else Noted(*found)

    def end(self, name: str) -> None:
        """Forget a batch: its answers are kept elsewhere, or it has failed."""
        with self._turn():
            self._database.execute("DELETE FROM lines WHERE name = ?", [name])
            self._database.execute("DELETE FROM batches WHERE name = ?", [name])

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @contextlib.contextmanager
    def _turn(self) -> Generator[None]:
        with self._explained(), self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        """Turn errors of the file into ``CacheError``: to go on without it would mean to pay again."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise CacheError(f"{self._path} can't be used: {error}") from error
