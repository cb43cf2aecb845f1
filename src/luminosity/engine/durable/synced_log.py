"""How much of a checkpoint would survive a power loss, and how a start goes back to that."""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

from luminosity._shared.shared_files import sync_file

__all__ = ["MARK", "SyncedLog", "sync_files"]

MARK = "synced"
_SLOT = struct.Struct("<QQ8s40sI")  # number, bytes of the log, its salts, boot id, checksum of all that
_SLOT_BYTES = 512  # a disk writes a sector as a whole
_HEADER = struct.Struct(">8xI4x8s8x")  # of SQLite's log: size of a page, and salts, which differ in each log
_FRAME = struct.Struct(">8x8s8x")  # the header of each page in the log: the salts again
_NO_LOG = bytes(8)  # in place of salts
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class SyncedLog:
    """Notes in a small file up to where the log of a database is on the disk, with all files that it refers to.

    A kill of all processes loses nothing that was written, whether it was synced or not. After a power loss, the disk
    may have the end of the log and lack files of blocks to which that end refers. So the first start after a reboot
    cuts the log off at the last sync.

    The database itself must only get what is synced: call :meth:`note` before SQLite writes the log back, and again
    after it, and let SQLite never do that by itself. One thread at a time may use it.
    """

    def __init__(self, database: str) -> None:
        """Open the mark of a database, and cut off its log if the machine was started since the last sync."""
        self._log = f"{database}-wal"
        folder = os.path.dirname(database)
        self._boot_id = boot_id()
        self._mark = os.open(os.path.join(folder, MARK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._salts, self._end = _NO_LOG, 0  # of the log as far as it was looked at
        try:
            sync_file(folder)
            self._number, size, salts, boot = self._read()
            if boot != self._boot_id:
                if self._number:
                    self._cut_off(size, salts)
                self.note()
        except BaseException:
            os.close(self._mark)
            raise

    @property
    def can_tell_reboots(self) -> bool:
        """Whether a start notices that the machine was started meanwhile. If not, everything must be synced at once."""
        return bool(self._boot_id)

    def note(self) -> None:
        """Sync the log, and note that all of it is on the disk. Sync the files that it refers to before."""
        self._find_end()
        if self._end:
            sync_file(self._log)
        self._write(self._end, self._salts)

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
        self._number += 1
        fields = self._number, size, salts, self._boot_id.encode()
        checksum = zlib.crc32(_SLOT.pack(*fields, 0))
        os.pwrite(self._mark, _SLOT.pack(*fields, checksum), self._number % 2 * _SLOT_BYTES)
        os.fsync(self._mark)

    def _read(self) -> tuple[int, int, bytes, str]:
        found = 0, 0, _NO_LOG, ""
        for slot in range(2):
            data = os.pread(self._mark, _SLOT.size, slot * _SLOT_BYTES)
            if len(data) < _SLOT.size:
                continue
            *fields, checksum = _SLOT.unpack(data)
            if zlib.crc32(_SLOT.pack(*fields, 0)) == checksum:
                number, size, salts, boot = fields
                found = max(found, (number, size, salts, boot.rstrip(b"\0").decode()))
        return found


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
