"""Keeps the answers of models in a file, so that the same question is paid for once, whatever becomes of the run."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luminosity._shared.shared_files import who_else_writes
from luminosity._shared.text import parse_size
from luminosity.errors import CacheError, InvalidArgument

__all__ = ["AnswerCache", "CacheSettings", "open_cache"]

_LOGGER = logging.getLogger(__name__)
_FILE = "answers.sqlite"
_LONGEST_LOCK_S = 60.0  # another process writes for some milliseconds; it makes room in less than a second
_USED_AGAIN_S = 3600.0  # how exactly a file knows when an answer was used last: a read is rarely a write, too
_KEEP = 0.9  # of the limit, after room was made: not with every answer
_OVERHEAD = 120  # bytes of an answer's row and its places in two indices
_MOST_KEYS = 500  # in one query; SQLite allows 999
_LONGEST_CLAIM_S = 3600.0  # then another process may ask, too: the one that claimed may hang

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer BLOB, checksum BLOB, used REAL);
CREATE INDEX IF NOT EXISTS by_use ON answers (used);
CREATE TABLE IF NOT EXISTS claims (key BLOB PRIMARY KEY, owner TEXT, since REAL);
CREATE TABLE IF NOT EXISTS total (one INTEGER PRIMARY KEY CHECK (one = 1), bytes INTEGER);
INSERT OR IGNORE INTO total VALUES (1, 0);
"""


@dataclass(frozen=True)
class CacheSettings:
    """The folder of a cache on each machine, and the bytes that it may hold.

    >>> CacheSettings.of("/tmp/answers", "1GB")
    CacheSettings(folder='/tmp/answers', limit=1000000000)
    """

    folder: str
    limit: int

    @classmethod
    def of(cls, folder: str | os.PathLike[str] | None, limit: str | int) -> CacheSettings | None:
        """Return the settings that a user gave; None without a folder."""
        if folder is None:
            return None
        unchecked: Any = limit
        size = parse_size(unchecked) if isinstance(unchecked, str) else unchecked
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            raise InvalidArgument(f"found cache_limit={limit!r}, expected a size, such as '10GB'")
        path = os.fspath(folder)
        if not path or "://" in path:
            raise InvalidArgument(f"found cache={path!r}, expected a folder on the machine's own disk")
        return cls(os.path.abspath(os.path.expanduser(path)), size)


class AnswerCache:
    """Answers by the digest of everything that they depend on. Any number of threads and processes may use the file.

    An answer that was put is in the file when ``put`` returns: it survives the end of the process, however it ends. An
    answer whose bytes have changed on the disk is not returned. If the file grows beyond its limit, the answers that
    were not used for longest are removed.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self._limit = settings.limit
        self._path = os.path.join(settings.folder, _FILE)
        self._lock = threading.Lock()
        """Threads of a process take turns."""
        self._asked = threading.Condition()
        """Protects ``_keys``, and says when one of them is free."""
        self._keys: set[bytes] = set()
        """Keys whose answers threads of this process ask for now."""
        with self._explained():
            os.makedirs(settings.folder, 0o700, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            if others := who_else_writes(settings.folder):
                _LOGGER.warning("%s, and could put wrong answers into the cache there.", others)
            self._database = sqlite3.connect(self._path, _LONGEST_LOCK_S, isolation_level=None, check_same_thread=False)
            self._file = self._identity()
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")  # a commit survives the process, and most crashes
            with self._turn():
                for statement in _TABLES.strip().split("\n"):
                    self._database.execute(statement)

    def is_there(self) -> bool:
        """Return whether the file that is open is still the one in the folder, which somebody may have removed."""
        try:
            return self._identity() == self._file
        except OSError:
            return False

    @contextlib.contextmanager
    def asking(self, key: bytes, patience_s: float) -> Generator[None]:
        """Hold a key while its answer is asked for. Look into the cache again first: another thread may have held it.

        A thread waits for ``patience_s`` seconds at most, then goes on without it: the other may be waiting for long.
        """
        deadline = time.monotonic() + patience_s
        with self._asked:
            while key in self._keys and (left := deadline - time.monotonic()) > 0:
                self._asked.wait(left)
            is_holder = key not in self._keys
            if is_holder:
                self._keys.add(key)
        try:
            yield
        finally:
            if is_holder:
                with self._asked:
                    self._keys.remove(key)
                    self._asked.notify_all()

    def claim(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those keys whose answers the caller must ask for now; other threads or processes ask for the rest.

        Release them when their answers are in the file. The claims of a process that has ended are free.
        """
        mine: list[bytes] = []
        now, owner = time.time(), _this_process()
        with self._explained(), self._turn():
            for key in keys:
                found = self._database.execute("SELECT owner, since FROM claims WHERE key = ?", [key]).fetchone()
                if found is None or not (_is_alive(found[0]) and 0 <= now - found[1] < _LONGEST_CLAIM_S):
                    self._database.execute("INSERT OR REPLACE INTO claims VALUES (?, ?, ?)", (key, owner, now))
                    mine.append(key)
        return mine

    def release(self, keys: Iterable[bytes]) -> None:
        """Give claims back."""
        with self._explained(), self._turn():
            owner = _this_process()
            rows = [(key, owner) for key in keys]
            self._database.executemany("DELETE FROM claims WHERE key = ? AND owner = ?", rows)

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the answers that are known, by key."""
        found: dict[bytes, bytes] = {}
        bad: list[bytes] = []
        old: list[bytes] = []
        now = time.time()
        with self._explained(), self._lock:
            for begin in range(0, len(keys), _MOST_KEYS):
                some = list(keys[begin : begin + _MOST_KEYS])
                asked = f"SELECT key, answer, checksum, used FROM answers WHERE key IN ({','.join('?' * len(some))})"
                for key, answer, checksum, used in self._database.execute(asked, some).fetchall():
                    if checksum != _checksum(key, answer):
                        bad.append(key)
                        continue
                    found[key] = answer
                    old += [key] if now - used > _USED_AGAIN_S else []
        if bad:
            _LOGGER.warning("%d answers in %s have changed on the disk, and are not used.", len(bad), self._path)
        if bad or old:
            with self._explained(), self._turn():
                self._remove(bad)
                self._database.executemany("UPDATE answers SET used = ? WHERE key = ?", [(now, key) for key in old])
        return found

    def put(self, answers: Mapping[bytes, bytes]) -> None:
        """Keep answers. They are in the file when this returns."""
        now = time.time()
        rows = [(key, answer, _checksum(key, answer), now) for key, answer in answers.items()]
        with self._explained(), self._turn():
            for row in rows:
                made = self._database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", row)
                if made.rowcount:
                    self._add_bytes(len(row[0]) + len(row[1]) + _OVERHEAD)
            if self._bytes() > self._limit:
                self._make_room()

    def remove(self, keys: Iterable[bytes]) -> None:
        """Forget answers, so that they are asked again."""
        with self._explained(), self._turn():
            self._remove(keys)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _identity(self) -> tuple[int, int]:
        found = os.stat(self._path)
        return found.st_dev, found.st_ino

    def _make_room(self) -> None:
        surplus = self._bytes() - int(self._limit * _KEEP)
        removed: list[bytes] = []
        for key, size in self._database.execute("SELECT key, LENGTH(key) + LENGTH(answer) FROM answers ORDER BY used"):
            if surplus <= 0:
                break
            surplus -= size + _OVERHEAD
            removed.append(key)
        self._remove(removed)

    def _remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            size = self._database.execute(
                "SELECT LENGTH(key) + LENGTH(answer) FROM answers WHERE key = ?", [key]
            ).fetchone()
            if size is not None:
                self._database.execute("DELETE FROM answers WHERE key = ?", [key])
                self._add_bytes(-size[0] - _OVERHEAD)

    def _bytes(self) -> int:
        return self._database.execute("SELECT bytes FROM total").fetchone()[0]

    def _add_bytes(self, count: int) -> None:
        self._database.execute("UPDATE total SET bytes = bytes + ?", [count])

    @contextlib.contextmanager
    def _turn(self) -> Generator[None]:
        """Write alone, and all or nothing."""
        with self._lock:
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
        except sqlite3.OperationalError as error:  # no room, no right, or locked for too long
            raise CacheError(f"{self._path} can't be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise CacheError(
                f"{self._path} is damaged: {error}", fix="move the file away; the answers in it are asked again"
            ) from error
        except OSError as error:
            raise CacheError(f"{self._path} can't be used: {error.strerror or error}") from error


def _this_process() -> str:
    return f"{os.getpid()}:{_started(os.getpid())}"


def _is_alive(owner: str) -> bool:
    """Return whether the process that made a claim still runs; one with the same number may be another one."""
    pid, _, started = owner.partition(":")
    return pid.isdecimal() and _started(int(pid)) == started


def _started(pid: int) -> str:
    """Return when a process has started, in ticks since the machine did; "" if it does not run."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _checksum(key: bytes, answer: bytes) -> bytes:
    return hashlib.blake2b(key + answer, digest_size=16).digest()


_lock = threading.Lock()
"""Protects ``_open``."""
_open: dict[tuple[int, CacheSettings], AnswerCache] = {}


def open_cache(settings: CacheSettings) -> AnswerCache:
    """Return this process's cache for these settings. A forked process gets its own.

    If the file has been removed, a new one is opened: answers in the old one would be lost with the process.
    """
    with _lock:
        key = os.getpid(), settings
        if key not in _open or not _open[key].is_there():
            _open[key] = AnswerCache(settings)  # other threads may still use the old one: it closes when none does
        return _open[key]
