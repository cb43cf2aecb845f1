"""The private folders of a run: removed when it ends, or by a later run if its process was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable

from luminosity._shared.shared_files import try_lock
from luminosity.errors import OptionError

__all__ = ["SHARED_MEMORY", "RunFolders", "make_locked", "remove_local"]


_PREFIX = "luminosity-"
_LOCK = "lock"
SHARED_MEMORY = "/dev/shm"
_LONGEST_SOCKET_PATH = 90  # the kernel takes 107 bytes, and a file name follows


class RunFolders:
    """Makes the folders of a run: ``memory`` for blocks, ``spill`` for data beyond the budget, and small files.

    The owner calls :meth:`remove`.
    """

    def __init__(self, spill_root: str | None = None, blocks: str | None = None) -> None:
        """Make the folders. ``blocks`` is a folder that outlives the run, if its blocks shall."""
        self._locks: list[int] = []
        self.all: list[str] = []
        try:
            self._make_all(spill_root or tempfile.gettempdir(), tempfile.gettempdir())
            if blocks is not None:
                shutil.rmtree(blocks, ignore_errors=True)  # of a start that was killed before it began
                os.makedirs(blocks, mode=0o700)
                self.memory = self.spill = blocks
        except BaseException:
            self.remove()
            raise

    def _make_all(self, spill_root: str, disk_root: str) -> None:
        disk = self._make(disk_root)
        self.spill = self._make_for_spilling(spill_root) if spill_root != disk_root else disk
        memory_root = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else disk_root
        self.memory = self._make(memory_root) if memory_root != disk_root else disk
        self.main_classes = os.path.join(disk, "main-classes")
        self.load_ahead = os.path.join(disk, "load-ahead")  # a prefix: one file per pool
        self.quota = os.path.join(disk, "quota")
        self.sockets = disk if len(disk) < _LONGEST_SOCKET_PATH else self._make("/tmp")
        self.url = f"unix:{self.sockets}/socket"

    def _make_for_spilling(self, root: str) -> str:
        try:
            os.makedirs(root, exist_ok=True)
            return self._make(root)
        except OSError as error:
            message = f"--spill_dir={root}: {error.strerror or error}; expected a writable folder"
            raise OptionError(message) from error

    def _make(self, root: str) -> str:
        folder, lock = make_locked(root, str(os.getpid()))
        self._locks.append(lock)
        self.all.append(folder)
        return folder

    def guard(self, start: Callable[[list[str], list[int]], int]) -> None:
        """Let another process remove the folders if this one is killed.

        ``start`` starts it for folders and their locks, and returns the file descriptor whose end it waits for.
        """
        self._locks.append(start(self.all, self._locks))

    def remove_blocks_of(self, worker_id: str, keep: set[str]) -> None:
        """Remove files of a dead worker that no message refers to."""
        for folder in {self.memory, self.spill}:
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                if name.startswith(f"{worker_id}.") and path not in keep:
                    os.unlink(path)

    def remove(self) -> None:
        """Remove all folders and release their locks."""
        for folder in self.all:
            shutil.rmtree(folder, ignore_errors=True)
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()


def make_locked(root: str, name: str) -> tuple[str, int]:
    """Make a folder that only this user can use, and return it with its lock, which the caller closes at the end.

    Its name contains ``name``. First removes the folders of killed runs in ``root``.
    """
    remove_abandoned(root)
    while True:
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{name}-", dir=root)
        lock = os.open(os.path.join(folder, _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        # Another run may take the folder for abandoned before it is locked. Don't wait for that run: it may be
        # suspended.
        if try_lock(lock) and os.path.exists(os.path.join(folder, _LOCK)):
            return folder, lock
        os.close(lock)


def remove_local(folders: Iterable[str]) -> None:
    """Remove the folders that are on this machine, with their contents."""
    for folder in folders:
        if os.path.isabs(folder):  # otherwise it is a URL of another file system
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(root: str) -> None:
    """Remove folders of runs whose process was killed: nothing holds their lock."""
    for name in os.listdir(root):
        if not name.startswith(_PREFIX):
            continue
        folder = os.path.join(root, name)
        if os.path.islink(folder):
            continue
        # Leave folders of other users alone, and those that their owner is just making or removing.
        with contextlib.suppress(OSError):
            lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if try_lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
