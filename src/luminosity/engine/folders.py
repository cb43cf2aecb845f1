"""The private folders of a run: gone when it ends, and cleaned by the next run if it could not end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable

from luminosity.errors import OptionError

_PREFIX = "luminosity-"
_LOCK = "lock"
_SHARED_MEMORY = "/dev/shm"
_LONGEST_SOCKET_PATH = 90  # the kernel takes 107 bytes


class RunFolders:
    """``memory`` for blocks, ``spill`` for what is beyond the budget, and a few small files of the run."""

    def __init__(self, spill_root: str | None = None) -> None:
        self._locks: list[int] = []
        self.all: list[str] = []
        try:
            self._make_all(spill_root or tempfile.gettempdir(), tempfile.gettempdir())
        except BaseException:
            self.remove()
            raise

    def _make_all(self, spill_root: str, disk_root: str) -> None:
        disk = self._make(disk_root)
        self.spill = self._make_for_spilling(spill_root) if spill_root != disk_root else disk
        memory_root = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else disk_root
        self.memory = self._make(memory_root) if memory_root != disk_root else disk
        self.main_classes = os.path.join(disk, "main-classes")
        self.quota = os.path.join(disk, "quota")
        self.sockets = disk if len(disk) < _LONGEST_SOCKET_PATH else self._make("/tmp")
        self.url = f"unix:{self.sockets}/socket"

    def _make_for_spilling(self, root: str) -> str:
        try:
            os.makedirs(root, exist_ok=True)
            return self._make(root)
        except OSError as error:
            message = f"--spill_dir={root}: expected a folder that can be written to; {error.strerror or error}"
            raise OptionError(message) from error

    def _make(self, root: str) -> str:
        remove_abandoned(root)
        while True:
            folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root)  # readable by this user alone
            lock = os.open(os.path.join(folder, _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            # Another run may take it for abandoned before it is locked, and is not waited for: it may be stopped.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.exists(os.path.join(folder, _LOCK)):
                    self._locks.append(lock)
                    self.all.append(folder)
                    return folder
            os.close(lock)

    def remove_blocks_of(self, worker_id: str, keep: set[str]) -> None:
        """Remove files that a worker wrote and nobody has heard of, because it died first."""
        for folder in {self.memory, self.spill}:
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                if name.startswith(f"{worker_id}.") and path not in keep:
                    os.unlink(path)

    def remove(self) -> None:
        for folder in self.all:
            shutil.rmtree(folder, ignore_errors=True)
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()


def remove_local(folders: Iterable[str]) -> None:
    """Remove those that are on this machine, with all that is in them."""
    for folder in folders:
        if os.path.isabs(folder):  # else an address on another file system
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(root: str) -> None:
    """Remove what runs left behind whose process was killed: their lock is free."""
    for name in os.listdir(root):
        folder = os.path.join(root, name)
        if not name.startswith(_PREFIX) or os.path.islink(folder):
            continue
        # A folder of another user, or one that its owner is just making or removing, is not ours to judge.
        with contextlib.suppress(OSError):
            lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
