"""How much of a checkpoint was written and would survive a power loss, and how a start goes back to that."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from luminosity._shared.shared_files import sync_file
from luminosity.engine.durable.tables import damaged

__all__ = ["MARK", "Mark", "SyncedLog", "boot_id", "read_mark", "reset_mark", "sync_files"]

_LOGGER = logging.getLogger(__name__)

MARK = "synced"
_SLOT = struct.Struct("<QQ8s40sI")  # number, bytes of the log, its salts, boot id, checksum of all that
_TRANSACTION = struct.Struct("<QI")  # behind it: the number of the last transaction in the log, checksum with the above
_SLOT_BYTES = 512  # a disk writes a sector as a whole
_WRITTEN = struct.Struct("<Q40sI")  # behind both slots: the last transaction that was written, boot id, checksum
_HELD = "up to where the log of the database is on the disk"
_HEADER = struct.Struct(">8xI4x8s8x")  # of SQLite's log: size of a page, and salts, which differ in each log
_FRAME = struct.Struct(">8x8s8x")  # the header of each page in the log: the salts again
_NO_LOG = bytes(8)  # in place of salts
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True)
class Mark:
    """What is noted beside a database."""

    count: int = 0  # how often it was noted; 0: never
    size: int = 0  # bytes of the log that are on the disk
    salts: bytes = _NO_LOG
    boot: str = ""  # the start of the machine in which that was noted
    synced: int = 0  # the last transaction that is on the disk
    written: int = 0  # the last transaction that was written, unless the machine was started since
    written_boot: str = ""
    unreadable: int = 0  # entries that are damaged

    def least(self, boot: str) -> int:
        """Return which transaction the database must have, in this start of the machine."""
        return max(self.synced, self.written if boot and boot == self.written_boot else 0)


class SyncedLog:
    """Notes in a small file up to where the log of a database is on the disk, with all files that it refers to.

    A kill of all processes loses nothing that was written, whether it was synced or not. After a power loss, the disk
    may have the end of the log and lack files of blocks to which that end refers. So the first start after a reboot
    cuts the log off at the last sync.

    It notes the numbers of the last transactions as well: a log that is damaged looks to SQLite like one that ends
    earlier, and an older copy of the database like any other. :attr:`least` tells them apart.

    The database itself must only get what is synced: call :meth:`note` before SQLite writes the log back, and again
    after it, and let SQLite never do that by itself. One thread at a time may use it.
    """

    def __init__(self, database: str) -> None:
        """Open the mark of a database, and cut off its log if the machine was started since the last sync.

        Raises :class:`CheckpointDamaged` if there is a database, and no mark that can be read.
        """
        self._log = f"{database}-wal"
        folder = os.path.dirname(database)
        path = os.path.join(folder, MARK)
        self._boot_id = boot_id()
        has_database = os.path.isfile(database) and os.path.getsize(database) > 0
        if has_database and not os.path.exists(path):
            raise damaged(path, "is missing", _HELD)
        self._mark = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._salts, self._end = _NO_LOG, 0  # of the log as far as it was looked at
        try:
            sync_file(folder)
            found = _read(self._mark)
            if not found.count and has_database:
                raise damaged(path, "can't be read", _HELD)
            self._count, self._number = found.count, found.synced
            self.least = found.least(self._boot_id)
            if found.unreadable:
                _LOGGER.warning("%s is damaged in part; its other entry is used", path)
            if found.boot != self._boot_id or not found.count:
                if found.count:
                    self._cut_off(found.size, found.salts)
                self.note()
        except BaseException:
            os.close(self._mark)
            raise

    @property
    def can_tell_reboots(self) -> bool:
        """Whether a start notices that the machine was started meanwhile. If not, everything must be synced at once."""
        return bool(self._boot_id)

    def note(self, number: int | None = None) -> None:
        """Sync the log, and note that all of it is on the disk, up to a transaction.

        Sync the files that it refers to before. Without ``number``, it is the one that was noted last.
        """
        self._find_end()
        if self._end:
            sync_file(self._log)
        self._number = self._number if number is None else number
        self._write(self._end, self._salts)

    def note_written(self, number: int) -> None:
        """Note that a transaction was written, for starts after a kill."""
        fields = number, self._boot_id.encode()
        os.pwrite(self._mark, _WRITTEN.pack(*fields, zlib.crc32(_WRITTEN.pack(*fields, 0))), 2 * _SLOT_BYTES)

    def close(self) -> None:
        """Close the mark."""
        os.close(self._mark)

    def _find_end(self) -> None:
        """Look where the log ends. The file may be longer, with pages of an older log behind the end."""
        try:
            with open(self._log, "rb", buffering=0) as log:
                header = log.read(_HEADER.size)
                if len(header) < _HEADER.size:
                    self._salts, self._end = _NO_LOG, 0
                    return
                page, salts = _HEADER.unpack(header)
                if salts != self._salts:
                    self._salts, self._end = salts, _HEADER.size
                while (frame := os.pread(log.fileno(), _FRAME.size, self._end)) and len(frame) == _FRAME.size:
                    if _FRAME.unpack(frame)[0] != salts:
                        return
                    self._end += _FRAME.size + page
        except FileNotFoundError:
            self._salts, self._end = _NO_LOG, 0

    def _cut_off(self, size: int, salts: bytes) -> None:
        self._find_end()
        # If it is another log, the one that is noted is in the database, and nothing of this one was synced.
        kept = size if self._salts == salts else 0
        with contextlib.suppress(FileNotFoundError):
            if os.path.getsize(self._log) > kept:
                os.truncate(self._log, kept)
        self._salts, self._end = _NO_LOG, 0

    def _write(self, size: int, salts: bytes) -> None:
        # Two slots in turn: a write that the power loss cuts short leaves the other one.
        self._count += 1
        slot = _packed(self._count, size, salts, self._boot_id, self._number)
        os.pwrite(self._mark, slot, self._count % 2 * _SLOT_BYTES)
        os.fsync(self._mark)


def reset_mark(path: str, number: int) -> None:
    """Note that a database has no log, and ends with a transaction."""
    mark = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(mark, _packed(1, 0, _NO_LOG, boot_id(), number), _SLOT_BYTES)
        os.fsync(mark)
    finally:
        os.close(mark)
    sync_file(os.path.dirname(path))


def read_mark(folder: str) -> Mark | None:
    """Return what is noted in a folder, or None if there is no mark."""
    try:
        descriptor = os.open(os.path.join(folder, MARK), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _read(mark: int) -> Mark:
    found = Mark()
    unreadable = 0
    for slot in range(2):
        data = os.pread(mark, _SLOT.size + _TRANSACTION.size, slot * _SLOT_BYTES)
        if not any(data):
            continue
        if (entry := _slot(data)) is None:
            unreadable += 1
        elif entry.count > found.count:
            found = entry
    written, boot = 0, ""
    data = os.pread(mark, _WRITTEN.size, 2 * _SLOT_BYTES)
    if any(data):
        number, encoded, checksum = _WRITTEN.unpack(data.ljust(_WRITTEN.size, b"\0"))
        if zlib.crc32(_WRITTEN.pack(number, encoded, 0)) == checksum:
            written, boot = number, _text(encoded)
        else:
            unreadable += 1
    return replace(found, written=written, written_boot=boot, unreadable=unreadable)


def _packed(count: int, size: int, salts: bytes, boot: str, number: int) -> bytes:
    fields = count, size, salts, boot.encode()
    slot = _SLOT.pack(*fields, zlib.crc32(_SLOT.pack(*fields, 0)))
    return slot + _TRANSACTION.pack(number, zlib.crc32(slot + _TRANSACTION.pack(number, 0)))


def _slot(data: bytes) -> Mark | None:
    """Return what one slot says, or None if it is damaged. Slots of the version before have no transaction."""
    data = data.ljust(_SLOT.size + _TRANSACTION.size, b"\0")
    count, size, salts, boot, checksum = _SLOT.unpack_from(data)
    if zlib.crc32(_SLOT.pack(count, size, salts, boot, 0)) != checksum:
        return None
    synced, checksum = _TRANSACTION.unpack_from(data, _SLOT.size)
    if (synced or checksum) and zlib.crc32(data[: _SLOT.size] + _TRANSACTION.pack(synced, 0)) != checksum:
        return None
    return Mark(count, size, salts, _text(boot), synced)


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode()


def boot_id() -> str:
    """Return what differs after each start of the machine. Empty if the system does not tell it."""
    try:
        return Path(_BOOT_ID).read_text().strip()
    except OSError:
        return ""


def sync_files(paths: Iterable[str]) -> None:
    """Make files survive a power loss. Those that were removed meanwhile are left out."""
    folders: set[str] = set()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            sync_file(path)
            folders.add(os.path.dirname(path))
    for folder in folders:
        sync_file(folder)
