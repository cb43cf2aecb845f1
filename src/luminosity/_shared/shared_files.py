"""Files that processes and users share: locks, whole replacement, digests, eviction, and who can write to a folder.

The locks of open files and folders hold between the processes and threads of one machine. The kernel releases a lock
when its holder dies. Digests are SHA-256, in hexadecimal digits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import hashlib
import os
import pwd
import random
import stat
import time
from collections.abc import Callable, Generator, Iterable

__all__ = [
    "evict_until",
    "file_digest",
    "is_own_file",
    "locked",
    "replace_file",
    "sync_file",
    "text_digest",
    "try_lock",
    "unlock",
    "who_else_writes",
]

_POLL_S = 0.02  # short beside any work done under a lock, long enough to cost no CPU time
_CHUNK = 1 << 20  # bytes that are read at once


def try_lock(descriptor: int, shared: bool = False) -> bool:
    """Take the lock of an open file if it is free now; return whether it was taken."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def unlock(descriptor: int) -> None:
    """Release the lock. Closing the file is not enough where a forked child has it open, too."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def locked(descriptor: int, timeout_s: float, poll_s: float = _POLL_S) -> Generator[None]:
    """Hold the lock of an open file alone.

    Raises ``TimeoutError`` if another holder keeps it for ``timeout_s`` seconds. ``poll_s`` is the time between two
    attempts.
    """
    deadline = time.monotonic() + timeout_s
    while not try_lock(descriptor):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.3g} s for a lock")
        time.sleep(poll_s * random.uniform(0.5, 1.5))
    try:
        yield
    finally:
        unlock(descriptor)


def replace_file(
    path: str | os.PathLike[str],
    content: str | bytes,
    *,
    is_private: bool = False,
    has_writers: bool = False,
    is_synced: bool = False,
) -> None:
    """Write a file in one move: readers find the old content or the new one, never a part of it.

    Until then, the content is in a file with ``.unfinished`` behind its name. Pass ``is_private`` if only this user may
    read the file, ``has_writers`` if several processes may write it at once, and ``is_synced`` if the content must
    survive a power loss.
    """
    unfinished = f"{os.fspath(path)}{f'.{os.getpid()}' if has_writers else ''}.unfinished"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(unfinished, flags, 0o600 if is_private else 0o666), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if is_synced:
            file.flush()
            os.fsync(file.fileno())
    os.replace(unfinished, path)


def sync_file(path: str) -> None:
    """Make a file, or the names in a folder, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the digest of a file's bytes. Raises ``OSError`` if it can't be read.

    >>> file_digest(os.devnull)[:8]
    'e3b0c442'
    """
    digest = hashlib.sha256()  # hashlib.file_digest came with Python 3.11
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def text_digest(*lines: str, digits: int = 64) -> str:
    """Return the first digits of the digest of a text, or of several lines.

    >>> text_digest("reviews", digits=8), text_digest("a", "b") == text_digest("a\\nb")
    ('54641051', True)
    """
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:digits]


def who_else_writes(folder: str | os.PathLike[str]) -> str:
    """Return in a sentence that other users can write to an existing folder, or an empty string if they can't.

    A folder that a group shares is meant to be shared if it has the sticky bit, with which nobody can remove or replace
    files of others.
    """
    found = os.stat(folder)
    mode = stat.S_IMODE(found.st_mode)
    described = f"mode {mode:04o}, owner {_user(found.st_uid)}, group {_group(found.st_gid)}"
    if os.geteuid() not in (found.st_uid, 0) and found.st_uid != 0:
        return f"{folder} belongs to another user ({described})"
    if mode & stat.S_IWOTH:
        what = "put files there" if mode & stat.S_ISVTX else "write there"
        return f"every user of this machine can {what}: {folder} ({described})"
    if mode & stat.S_IWGRP and not mode & stat.S_ISVTX and not _is_private(found.st_gid):
        return f"other users of the group can write there: {folder} ({described})"
    return ""


def is_own_file(descriptor: int) -> bool:
    """Return whether an open file is a plain one that this user or root has written."""
    found = os.fstat(descriptor)
    return stat.S_ISREG(found.st_mode) and found.st_uid in (os.geteuid(), 0)


def _is_private(gid: int) -> bool:
    """Return whether a group is that of this user alone, as many systems make one for each user."""
    if gid == 0:
        return True
    with contextlib.suppress(KeyError):
        mine, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
        return mine.pw_gid == gid and group.gr_name == mine.pw_name and not {*group.gr_mem} - {mine.pw_name}
    return False


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def evict_until(
    is_enough: Callable[[int], bool], entries: Iterable[tuple[float, int, str]], evict: Callable[[str], bool]
) -> int:
    """Evict the least recently used entries of a cache until these freed bytes are enough; return the freed bytes.

    An entry is its last use, its bytes and its name. ``evict`` returns whether it removed the entry.

    >>> evict_until(lambda freed: freed >= 5, [(3.0, 9, "new"), (1.0, 4, "old"), (2.0, 2, "used"), (2.5, 3, "b")],
    ...     lambda name: name != "used")
    7
    """
    freed = 0
    for _, size, name in sorted(entries):
        if is_enough(freed):
            break
        freed += size if evict(name) else 0
    return freed
