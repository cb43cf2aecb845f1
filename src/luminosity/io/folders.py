"""Folders of this machine: whether files can be made there, locks, copies, and folders that are replaced as a whole."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Generator

from luminosity._shared.shared_files import locked, try_lock
from luminosity.errors import Fix, StoreError

__all__ = ["ReplacedFolder", "copy_folder", "lock_file", "lock_folder", "why_not_writable"]

_CHUNK_BYTES = 4 << 20  # copied at once: more would not be faster
_PID_BYTES = 20  # more than any process id has


def why_not_writable(folder: str) -> str | None:
    """Return why no file can be made in the folder, or None if one can. Folders that do not exist yet can be made.

    >>> why_not_writable("/tmp/a/new/folder"), why_not_writable(__file__ + "/below") is None
    (None, False)
    """
    nearest = os.path.abspath(folder)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    if not os.path.isdir(nearest):
        return f"found a file at {nearest}, expected a folder"
    if os.access(nearest, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return None
    if os.statvfs(nearest).f_flag & os.ST_RDONLY:
        return f"the disk is read-only at {nearest}"
    return f"this user may not write to {nearest}"


_LOGGER = logging.getLogger(__name__)


@contextlib.contextmanager
def lock_folder(folder: str, timeout_s: float) -> Generator[None]:
    """Hold the lock of a folder. Raises ``TimeoutError`` if another job keeps it for ``timeout_s`` seconds.

    Nothing is locked if the folder is not on this machine, or if its file system has no locks.
    """
    with contextlib.ExitStack() as held:
        descriptor = _open(folder)
        if descriptor is not None:
            held.callback(os.close, descriptor)
            try:
                held.enter_context(locked(descriptor, timeout_s))
            except TimeoutError:
                raise TimeoutError(
                    f"waited {timeout_s:.3g} s for another job that puts its files into {folder}"
                ) from None
            except OSError as error:
                _LOGGER.debug("can't lock %s: %s", folder, error)
        yield


def _open(folder: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return None


@contextlib.contextmanager
def lock_file(path: str, timeout: float) -> Generator[None]:
    """Hold the lock of a file, between threads and processes; raise after waiting for ``timeout`` seconds."""
    with contextlib.ExitStack() as lock:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        lock.callback(os.close, descriptor)
        try:
            lock.enter_context(locked(descriptor, timeout))
        except TimeoutError:
            holder = os.pread(descriptor, _PID_BYTES, 0).decode(errors="replace") or "unknown"
            raise StoreError(
                f"waited {timeout:.3g} s for {path}, which process {holder} holds",
                fix=Fix(
                    "check whether that process is stuck; if it still writes, pass a longer timeout= or use a server",
                    command="check whether that process is stuck; if it still writes, use fewer workers or a server",
                ),
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield


class ReplacedFolder:
    """A folder that the processes of this machine use in turns, and that writers may replace as a whole.

    Locks are files beside it. A new content is built in ``unfinished``, so that a process that is killed leaves no half
    of it.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path = path
        self.unfinished = f"{path}.unfinished"
        self._replaced = f"{path}.replaced"  # the old folder while the new one takes its place
        self._timeout_s = timeout_s

    @property
    def exists(self) -> bool:
        """Whether there is a folder."""
        return os.path.isdir(self.path)

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Hold the lock of the folder, to open it or to put another in its place."""
        with lock_file(f"{self.path}.lock", self._timeout_s):
            if os.path.isdir(self._replaced):  # A process was killed while it swapped the folders.
                if self.exists:
                    shutil.rmtree(self._replaced, ignore_errors=True)
                else:
                    os.rename(self._replaced, self.path)
            yield

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of writers: a write between the copy and the swap of another process would be lost."""
        return lock_file(f"{self.path}.writing", self._timeout_s)

    def writer(self) -> int | None:
        """Return the id of the process that writes at this moment, if there is one."""
        with contextlib.ExitStack() as opened, contextlib.suppress(FileNotFoundError):
            descriptor = os.open(f"{self.path}.writing", os.O_RDWR | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            if not try_lock(descriptor):
                pid = os.pread(descriptor, _PID_BYTES, 0).decode(errors="replace")
                return int(pid) if pid.isdigit() else None
        return None

    def remove_unfinished(self) -> None:
        """Remove what a process that was killed, or that failed, has built."""
        shutil.rmtree(self.unfinished, ignore_errors=True)

    def swap(self) -> None:
        """Put the unfinished folder in the place of the old one. If this is killed half-way, ``locked`` undoes it."""
        if self.exists:
            os.rename(self.path, self._replaced)
        os.rename(self.unfinished, self.path)
        shutil.rmtree(self._replaced, ignore_errors=True)


def copy_folder(source: str, destination: str) -> None:
    """Copy a folder. Holes in its files stay holes: Qdrant's files are mostly holes."""
    shutil.copytree(source, destination, copy_function=_copy_file)


def _copy_file(source: str, destination: str) -> None:
    with open(source, "rb") as old, open(destination, "wb") as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        start = 0
        while start < size:
            try:
                start = os.lseek(old.fileno(), start, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # There is only a hole left.
                    return
                raise
            end = os.lseek(old.fileno(), start, os.SEEK_HOLE)
            old.seek(start)
            new.seek(start)
            while chunk := old.read(min(_CHUNK_BYTES, end - start)):
                new.write(chunk)
                start += len(chunk)
            start = end
