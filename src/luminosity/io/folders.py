"""Folders of this machine: whether files can be made there, locks on folders and files, and copies of folders."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Generator

from luminosity._shared.shared_files import locked
from luminosity.errors import Fix, StoreError

__all__ = ["copy_folder", "lock_file", "lock_folder", "why_not_writable"]

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
