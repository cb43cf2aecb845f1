"""The private folder in which the processes of a run find their host.

``lock`` is held by a client that starts a host, and by a host that leaves; ``alive`` by the host, as long as it lives.
The kernel frees both when their holder dies.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time

from luminosity.errors import HostUnavailable
from luminosity.inference.files.locks import try_exclusive

__all__ = ["HostFolder", "remove_abandoned"]

_RUN_ID = re.compile(r"[0-9a-f]{1,64}")
_LONGEST_SOCKET_PATH = 100  # bytes; Linux takes 107, macOS 103
_SECRET_BYTES = 32
_YOUNG_S = 60.0
_POLL_S = 0.02


class HostFolder:
    """Where everything is; ``make`` makes it, and may be called again when a host has just removed it."""

    def __init__(self, run_id: str) -> None:
        if not _RUN_ID.fullmatch(run_id):
            raise ValueError(f"expected up to 64 hexadecimal digits to name a run, found {run_id!r}")
        self.run_id = run_id
        self.base = os.path.join(_root(run_id), _name_of_base())
        self.path = os.path.join(self.base, run_id)
        self.lock = os.path.join(self.path, "lock")
        self.alive = os.path.join(self.path, "alive")
        self.socket = os.path.join(self.path, "socket")
        self.output = os.path.join(self.path, "output")
        """What the host and its libraries write to their standard streams."""

    def make(self) -> None:
        for _ in range(100):  # a host that leaves may remove the upper one at any moment
            with contextlib.suppress(FileNotFoundError):
                _make_private(self.base)
                _make_private(self.path)
                return
        raise HostUnavailable(f"can't make the folder {self.path}: {self.base} disappears again and again")

    def secret(self) -> bytes:
        """What the processes of this run know, and nobody else; made by the first who asks."""
        path = os.path.join(self.path, "secret")
        with contextlib.suppress(FileNotFoundError):
            return _read(path)
        mine = f"{path}-{secrets.token_hex(8)}"
        descriptor = os.open(mine, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(_SECRET_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(mine, path)  # whole, or not at all
        finally:
            os.unlink(mine)
        return _read(path)

    def remove(self) -> None:
        """At once for everybody else: it has another name before the first of its files is gone. Hold the lock."""
        _remove(self.path)
        with contextlib.suppress(OSError):  # other runs have theirs there
            os.rmdir(self.base)

    def remove_if_dead(self, seconds: float) -> None:
        """What a host left behind that was killed, just now perhaps; whoever leaves last does it."""
        end = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # It is not there, or another one is at it.
            while not _remove_if_dead(self.path) and time.monotonic() < end:
                time.sleep(_POLL_S)
            os.rmdir(self.base)


def remove_abandoned(base: str) -> None:
    """Remove what hosts left behind which were killed, and to which nobody came back."""
    for entry in os.scandir(base):
        # One that its owner is just making or removing is not ours to judge.
        with contextlib.suppress(OSError):
            if not entry.is_dir(follow_symlinks=False) or time.time() - entry.stat().st_mtime < _YOUNG_S:
                continue
            _remove_if_dead(entry.path)


def _remove_if_dead(path: str) -> bool:
    with try_exclusive(os.path.join(path, "lock")) as is_unused:
        if not is_unused:
            return False  # Nor is the other one touched: a host that is just being started takes it, or goes.
        with try_exclusive(os.path.join(path, "alive")) as is_dead:
            if is_dead:
                _remove(path)
            return is_dead


def _root(run_id: str) -> str:
    for root in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(os.path.join(root, _name_of_base(), run_id, "socket"))) <= _LONGEST_SOCKET_PATH:
            return root
    raise HostUnavailable(
        f"the name of a socket may have {_LONGEST_SOCKET_PATH} bytes, and a run of {len(run_id)} digits in "
        f"{tempfile.gettempdir()} needs more; expected a shorter TMPDIR"
    )


def _name_of_base() -> str:
    return f"luminosity-{os.getuid()}"


def _make_private(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
        return
    raise HostUnavailable(
        f"{path} should be a folder that user {os.getuid()} alone may use, since models and data pass through it; "
        f"found {stat.filemode(status.st_mode)} of user {status.st_uid}: remove it, or set TMPDIR to another folder"
    )


def _read(path: str) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as file:
        secret = bytes.fromhex(file.read(2 * _SECRET_BYTES))
    if len(secret) != _SECRET_BYTES:
        raise HostUnavailable(f"{path} holds {len(secret)} bytes, expected {_SECRET_BYTES}: remove its folder")
    return secret


def _remove(path: str) -> None:
    gone = f"{path}-{secrets.token_hex(4)}"
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)
