"""The folder of a checkpoint: its lock, its rows in SQLite, and the files of its blocks."""

from __future__ import annotations

import contextlib
import json
import logging
import marshal
import os
import shutil
import socket
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from luminosity._shared.shared_files import try_lock, who_else_writes
from luminosity._shared.text import format_bytes
from luminosity.engine.data.world import THIS_MACHINE, Clock
from luminosity.engine.durable import tables
from luminosity.engine.durable.place import DATABASE, LOCK, OPEN_HERE, check_database, check_names, holder_of
from luminosity.engine.durable.synced_log import MARK, SyncedLog, sync_files
from luminosity.engine.durable.tables import BLOCKS, FILES, KEPT, NUMBER, VERSION, StoredContent
from luminosity.engine.durable.upkeep.kept_states import KeptStates
from luminosity.errors import CheckpointDamaged, CheckpointError, CheckpointFailed

__all__ = ["CheckpointFolder", "StoredContent", "Transaction"]

_LOGGER = logging.getLogger(__name__)

_LOG_BYTES = 4 << 20  # the log is written back when it is longer
_LONGEST_LOG_BYTES = 16 << 20  # a log that is longer is synced and written back soon
_CHANGED = "changed"  # a temporary table
_FULL = "disk is full"  # in the message of SQLite
_READERS_S = 10.0  # until the log is written back after a try during which another process read
_LEAST_FREE_PAGES = 1000  # 4 MB: fewer free pages of the database are not given back to the file system


@dataclass
class Transaction:
    """What one checkpoint changes. The loop's thread fills it, then the writer's thread owns it."""

    number: int
    rows: dict[tuple[str, bytes], bytes | None] = field(default_factory=dict[tuple[str, bytes], bytes | None])
    cleared: set[str] = field(default_factory=set[str])  # owners that lose all rows they have so far
    contents: list[StoredContent] = field(default_factory=list[StoredContent])
    dropped: list[int] = field(default_factory=list[int])  # numbers of contents
    meta: dict[str, str] = field(default_factory=dict[str, str])
    files: list[str] = field(default_factory=list[str])  # new files that rows or contents refer to

    @property
    def is_empty(self) -> bool:
        """Whether nothing has changed."""
        return not (self.rows or self.cleared or self.contents or self.dropped or self.meta)


class CheckpointFolder:
    """A checkpoint folder that this process holds the lock of. The owner calls :meth:`close`.

    Any thread may use it, one at a time.
    """

    def __init__(
        self, path: str, *, restart: bool = False, kept: KeptStates | None = None, clock: Clock = THIS_MACHINE.clock
    ) -> None:
        """Lock the folder, and make it if there is none. With ``restart``, remove everything that was saved there.

        Earlier states are kept in ``kept``, if it is given.

        Raises :class:`CheckpointError` if another process holds it, or if it is no checkpoint folder of this version,
        :class:`CheckpointDamaged` if a part of it is missing or is not what was written, and :class:`CheckpointFailed`
        if it can't be written.
        """
        self.path = path
        self.turn = threading.Lock()  # held while a checkpoint is written and passed on
        self.on_write: Callable[[Transaction], None] | None = None  # called with what was just written
        self._kept = kept
        self._clock = clock
        check_names(path)
        with self.explain_errors():
            os.makedirs(path, mode=0o700, exist_ok=True)
            if said := who_else_writes(path):
                _LOGGER.warning(
                    "the run is kept where others can change what it continues with: %s; expected a folder that only "
                    "you can write to: `chmod 700 %s`",
                    said,
                    path,
                )
            self._lock = os.open(os.path.join(path, LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if not try_lock(self._lock):
            holder = holder_of(path)
            os.close(self._lock)
            raise CheckpointError(
                f"the checkpoint folder {path} is in use{f' by {holder}' if holder else ''}",
                fix="choose another --checkpoint_dir, wait for that run, or stop it with lum stop",
            )
        try:
            self._database = os.path.join(path, DATABASE)
            self.blocks = os.path.join(path, BLOCKS)
            self._unsynced: set[str] = set()  # files that checkpoints refer to
            with self.explain_errors():
                self._note_holder(clock.time())
                if restart:
                    self._remove_all()
                check_database(path)
                self._synced_log = SyncedLog(self._database)
            with contextlib.ExitStack() as on_error:
                on_error.callback(self._synced_log.close)
                OPEN_HERE.add(opened := os.path.realpath(self._database))
                on_error.callback(OPEN_HERE.discard, opened)
                self._rows = self._connect(on_error)
                on_error.pop_all()
            self._inode = os.stat(self._database).st_ino
        except BaseException:
            os.close(self._lock)
            raise

    def _remove_all(self) -> None:
        """Remove the database, whether or not this release can read it, and the files that it refers to.

        A start that comes after a kill in between is refused, since it can't tell that from damage.
        """
        for name in (self._database, f"{self._database}-wal", f"{self._database}-shm", os.path.join(self.path, MARK)):
            Path(name).unlink(missing_ok=True)
        for folder in (self.blocks, os.path.join(self.path, KEPT)):
            shutil.rmtree(folder, ignore_errors=True)

    def _note_holder(self, now: float) -> None:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": int(now)}
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, json.dumps(holder).encode(), 0)

    def _connect(self, on_error: contextlib.ExitStack) -> sqlite3.Connection:
        """Open the database, and let ``on_error`` close it."""
        is_new = not os.path.exists(self._database)
        try:
            rows = sqlite3.connect(self._database, check_same_thread=False, isolation_level=None)
            on_error.callback(rows.close)
            if is_new:
                os.chmod(self._database, 0o600)
                rows.execute("PRAGMA auto_vacuum = INCREMENTAL")
            rows.execute("PRAGMA journal_mode = WAL")
            # A kill of the process needs no sync; for a power loss :meth:`sync` is called, which also writes the log
            # back: what is not synced must not get into the database.
            rows.execute("PRAGMA synchronous = NORMAL")
            rows.execute("PRAGMA wal_autocheckpoint = 0")
            version = tables.version_of(rows, self._database)
            if version is None and not self._synced_log.least:
                tables.make_tables(rows)
                version = VERSION
        except sqlite3.Error as error:
            if _FULL in str(error):
                with self.explain_errors():
                    raise
            raise tables.damaged(self._database, f"can't be opened: {error}", "everything of the run") from error
        if version not in (VERSION, None):
            raise CheckpointError(
                f"the checkpoint in {self.path} has version {version}, and this release reads version {VERSION}",
                fix="continue it with the release that wrote it, or add --restart to begin again",
            )
        self._number = tables.check_rows(rows, self._database, self._synced_log.least)
        return rows

    def meta(self) -> dict[str, str]:
        """Return what is noted about the checkpoint as a whole."""
        return tables.stored_meta(self._rows, self._database)

    def note(self, **meta: str) -> None:
        """Note something about the checkpoint as a whole, at once."""
        with self._transaction(meta):
            pass

    def owners(self) -> set[str]:
        """Return the owners of all rows."""
        with tables.as_damage(self._database, "everything of the run"):
            return {owner for (owner,) in self._rows.execute("SELECT DISTINCT owner FROM rows")}

    def rows(self, owner: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys and values of an owner's rows, in the order of their keys. Their checksums were compared."""
        with tables.as_damage(self._database, tables.what_it_held(owner)):
            yield from self._rows.execute("SELECT key, value FROM rows WHERE owner = ? ORDER BY key", (owner,))

    def contents(self) -> Iterator[StoredContent]:
        """Yield the data of all blocks."""
        return tables.stored_contents(self._rows, self._database)

    def check_files(self) -> None:
        """Raise :class:`CheckpointDamaged` if a file that the rows refer to is not what was written. Reads them all."""
        tables.check_files(self._rows, self._database)

    def write(self, changes: Transaction) -> None:
        """Write a checkpoint: all of it, or, if this fails or the process is killed, nothing."""
        self._check_presence()
        with self.turn:
            self._write(changes)
            if self.on_write is not None:
                self.on_write(changes)

    def _write(self, changes: Transaction) -> None:
        with self.explain_errors():
            self._unsynced.update(changes.files)
            for path in changes.files:
                with contextlib.suppress(FileNotFoundError):  # It is not needed any more, and was removed meanwhile.
                    key = os.path.relpath(path, self.path).encode()
                    changes.rows.setdefault((FILES, key), marshal.dumps(tables.file_sum(path)))
        with self._transaction(changes.meta):
            self._apply(changes)

    @contextlib.contextmanager
    def _transaction(self, meta: Mapping[str, str]) -> Generator[None]:
        """Write what is written within the context, and ``meta``, or nothing."""
        with self.explain_errors():
            self._rows.execute("BEGIN IMMEDIATE")
            try:
                yield
                noted = tables.meta_rows({**meta, NUMBER: str(self._number + 1)})
                self._rows.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", noted)
                self._rows.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._rows.execute("ROLLBACK")
                raise
            self._number += 1
            self._synced_log.note_written(self._number)

    def _check_presence(self) -> None:
        """Raise if the database was removed or replaced: SQLite would write on, into a file that no start finds."""
        try:
            is_present = os.stat(self._database).st_ino == self._inode
        except OSError:
            is_present = False
        if not is_present:
            raise CheckpointFailed(
                f"{self._database} was removed or replaced while the run used it; what the run had saved is lost",
                fix="leave the folder alone while a run uses it; the next start with this --checkpoint_dir begins anew",
            )

    def _apply(self, changes: Transaction) -> None:
        execute = self._rows.executemany
        execute("DELETE FROM rows WHERE owner = ?", [(owner,) for owner in changes.cleared])
        removed = [key for key, value in changes.rows.items() if value is None]
        execute("DELETE FROM rows WHERE owner = ? AND key = ?", removed)
        written = ((*key, value) for key, value in changes.rows.items() if value is not None)
        execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", tables.row_sums(written))
        execute("DELETE FROM contents WHERE id = ?", [(number,) for number in changes.dropped])
        execute("INSERT INTO contents VALUES (?, ?, ?, ?, ?, ?, ?)", map(tables.content_row, changes.contents))

    def set_aside(self, changed: Iterable[tuple[str, bytes, bytes, bytes | None]]) -> int:
        """Keep changed rows for the next :meth:`rearrange`: owner, old key, new key, new value. Returns their number.

        They are in a file of SQLite's until then. A row without a value is removed.
        """
        with self.explain_errors():
            self._rows.execute(f"CREATE TEMP TABLE {_CHANGED} (owner TEXT, key BLOB, new_key BLOB, value BLOB)")
            return self._rows.executemany(f"INSERT INTO {_CHANGED} VALUES (?, ?, ?, ?)", changed).rowcount

    def _put_changed(self) -> None:
        if not self._rows.execute("SELECT 1 FROM temp.sqlite_master WHERE name = ?", (_CHANGED,)).fetchone():
            return
        self._rows.execute(f"DELETE FROM rows WHERE (owner, key) IN (SELECT owner, key FROM {_CHANGED})")
        new = self._rows.execute(f"SELECT owner, new_key, value FROM {_CHANGED} WHERE value IS NOT NULL")
        self._rows.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", tables.row_sums(new))
        self._rows.execute(f"DROP TABLE {_CHANGED}")

    def rearrange(
        self,
        moves: Mapping[str, Iterable[str]],
        dropped: Iterable[str],
        meta: dict[str, str],
        key_of: Callable[[str, bytes], bytes] = lambda _, key: key,
    ) -> None:
        """Put rows that were set aside, remove those of some owners, move those of others, and note ``meta``, at once.

        ``key_of`` returns the key that a row has at its new owner.
        """
        with self._transaction(meta):
            self._put_changed()
            self._rows.executemany("DELETE FROM rows WHERE owner = ?", [(owner,) for owner in dropped])
            moved = {old: list(self.rows(old)) for old in moves}
            self._rows.executemany("DELETE FROM rows WHERE owner = ?", [(owner,) for owner in moves])
            copies = (
                (new, key_of(new, key), value)
                for old, rows in moved.items()
                for new in moves[old]
                for key, value in rows
            )
            self._rows.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", tables.row_sums(copies))

    @property
    def must_sync(self) -> bool:
        """Whether :meth:`sync` should be called soon: the log is long, or a start would not notice a reboot."""
        return not self._synced_log.can_tell_reboots or self._log_bytes() > _LONGEST_LOG_BYTES

    def sync(self, files: Iterable[str] = ()) -> None:
        """Make everything that was written survive a power loss, with ``files`` of an earlier start."""
        with self.explain_errors():
            sync_files(self._unsynced.union(files))
            self._unsynced.clear()
            self._synced_log.note(self._number)
            if self._log_bytes() > _LOG_BYTES:
                self._write_back()

    def _write_back(self) -> None:
        """Move the log, which is synced, into the database."""
        self._rows.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # Does nothing while another process reads.
        self._synced_log.note(self._number)

    def keep_state(self, *, at_start: bool = False) -> None:
        """Keep a copy of what is synced, if it is time to. A failure is told, and ends nothing."""
        now = self._clock.time()
        if self._kept is None or not self._kept.is_due(now, at_start=at_start):
            return
        try:
            self.sync()
            self._write_back()
            if self._log_bytes():
                self._kept.postpone(now + _READERS_S)
            else:
                self._kept.keep(self._rows, self._clock)
        except (CheckpointDamaged, CheckpointFailed, OSError, sqlite3.Error) as error:
            _LOGGER.warning("no earlier state of %s is kept: %s", self.path, error)

    def forget_kept_states(self) -> None:
        """Remove the kept states: the run has finished."""
        if self._kept is not None:
            self._kept.remove_all()

    def _log_bytes(self) -> int:
        try:
            return os.path.getsize(f"{self._database}-wal")
        except FileNotFoundError:
            return 0

    def shrink(self) -> None:
        """Give free pages back to the file system, if they are a large part."""
        with self.explain_errors():
            (free,) = self._rows.execute("PRAGMA freelist_count").fetchone()
            (pages,) = self._rows.execute("PRAGMA page_count").fetchone()
            if free > _LEAST_FREE_PAGES and 4 * free > pages:
                self._rows.execute(f"PRAGMA incremental_vacuum({free})").fetchall()

    def close(self) -> None:
        """Close the database and release the lock."""
        with contextlib.suppress(sqlite3.Error, OSError, CheckpointFailed):  # The log stays: that is as good.
            self.sync()
            self._write_back()
        self._rows.close()
        OPEN_HERE.discard(os.path.realpath(self._database))
        self._synced_log.close()
        os.ftruncate(self._lock, 0)
        os.close(self._lock)

    @contextlib.contextmanager
    def explain_errors(self) -> Generator[None]:
        """Raise ``CheckpointFailed``, with a remedy, in place of errors of the disk."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, sqlite3.Error) and tables.is_damage(error):
                raise CheckpointFailed(
                    f"the checkpoint can't be written: {self._database} is damaged: {error}",
                    fix=f"see all damage with `lum checkpoint {self.path} --check`",
                ) from error
            try:
                usage = shutil.disk_usage(self.path)
                room = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free"
            except OSError as missing:
                room = missing.strerror or str(missing)
            raise CheckpointFailed(
                f"the checkpoint in {self.path} can't be written: {error} ({room}); the last one stays as it is",
                fix="make room, then start again with the same --checkpoint_dir",
            ) from error
