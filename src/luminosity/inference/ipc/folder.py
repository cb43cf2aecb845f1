"""The private folder in which the processes of a run find the process that serves them, the host.

A client locks ``lock`` while it starts a host, and a host while it exits. The host locks ``alive`` as long as it lives.
The kernel releases both when their holder dies. The output of the host goes to a bounded file in the folder.
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

from luminosity._shared.model_sizes import NODE_FOLDER_VARIABLE
from luminosity.errors import HostUnavailable, InvalidArgument
from luminosity.inference.files.locks import try_exclusive

__all__ = ["HostFolder", "last_lines", "limit_file", "remove_abandoned"]

_LARGEST_FILE = 1 << 20  # bytes; libraries may write without end
_KEPT_BYTES = 1 << 16  # bytes that stay when the file is shortened
_LAST_LINES = 20  # enough for a traceback's end
_RUN_ID = re.compile(r"[0-9a-f]{1,64}")
_LONGEST_SOCKET_PATH = 100  # bytes; Linux takes 107, macOS 103
_SECRET_BYTES = 32
_YOUNG_S = 60.0  # a younger folder may just be created or removed by its owner
_POLL_S = 0.02  # short beside the end of a process
_MOST_TRIES = 100  # a host that exits may remove the upper folder at any moment


class HostFolder:
    """The paths of a run's folder. ``make`` creates it, again if a host has just removed it."""

    def __init__(self, run_id: str) -> None:
        if not _RUN_ID.fullmatch(run_id):
            raise InvalidArgument(f"found the run id {run_id!r}, expected up to 64 hexadecimal digits")
        self.run_id = run_id
        self.base = _base(run_id)
        self.path = os.path.join(self.base, run_id)
        self.lock = os.path.join(self.path, "lock")
        self.alive = os.path.join(self.path, "alive")
        self.socket = os.path.join(self.path, "socket")
        self.output = os.path.join(self.path, "output")
        """The host and its libraries write their standard streams to this file."""

    def make(self) -> None:
        """Create the folder if it is missing. Raises ``HostUnavailable`` if other users may use it."""
        for _ in range(_MOST_TRIES):
            with contextlib.suppress(FileNotFoundError):
                _make_private(self.base)
                _make_private(self.path)
                return
        raise HostUnavailable(f"can't create the folder {self.path}: other processes keep removing {self.base}")

    def secret(self) -> bytes:
        """Return the secret that only processes of this run know; the first call creates it."""
        path = os.path.join(self.path, "secret")
        with contextlib.suppress(FileNotFoundError):
            return _read(path)
        mine = f"{path}-{secrets.token_hex(8)}"
        descriptor = os.open(mine, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(_SECRET_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(mine, path)  # Other processes see the whole secret, or none.
        finally:
            os.unlink(mine)
        return _read(path)

    def remove(self) -> None:
        """Remove the folder; for other processes it disappears at once. The caller holds ``lock``."""
        _remove(self.path)
        with contextlib.suppress(OSError):  # Other runs have their folders there.
            os.rmdir(self.base)

    def remove_if_dead(self, seconds: float) -> None:
        """Remove the folder of a killed host; wait up to ``seconds`` for the host to end."""
        end = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # The folder is gone, or another process removes it.
            while not _remove_if_dead(self.path) and time.monotonic() < end:
                time.sleep(_POLL_S)
            os.rmdir(self.base)


def remove_abandoned(base: str) -> None:
    """Remove the folders of killed hosts that no client uses any more."""
    for entry in os.scandir(base):
        # A folder may disappear while this looks at it.
        with contextlib.suppress(OSError):
            if not entry.is_dir(follow_symlinks=False) or time.time() - entry.stat().st_mtime < _YOUNG_S:
                continue
            _remove_if_dead(entry.path)


def _remove_if_dead(path: str) -> bool:
    with try_exclusive(os.path.join(path, "lock")) as is_unused:
        if not is_unused:
            return False  # Leave ``alive`` alone, too: a host that is just starting needs it, or exits.
        with try_exclusive(os.path.join(path, "alive")) as is_dead:
            if is_dead:
                _remove(path)
            return is_dead


def _base(run_id: str) -> str:
    """Return the folder for the folders of runs: of this user on the machine, or of this run on a cluster's node."""
    bases = [os.path.join(root, f"luminosity-{os.getuid()}") for root in (tempfile.gettempdir(), "/tmp")]
    if node_folder := os.environ.get(NODE_FOLDER_VARIABLE):
        bases.insert(0, os.path.join(node_folder, "hosts"))
    for base in bases:
        if len(os.fsencode(os.path.join(base, run_id, "socket"))) <= _LONGEST_SOCKET_PATH:
            return base
    raise HostUnavailable(
        f"found a path longer than {_LONGEST_SOCKET_PATH} bytes for the socket of a run in {tempfile.gettempdir()}",
        fix="set TMPDIR to a folder with a shorter path",
    )


def _make_private(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
        return
    raise HostUnavailable(
        f"found {stat.filemode(status.st_mode)} of user {status.st_uid} at {path}, expected a folder that only user "
        f"{os.getuid()} may use, because models and data pass through it",
        fix="remove it, or set TMPDIR to another folder",
    )


def _read(path: str) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as file:
        secret = bytes.fromhex(file.read(2 * _SECRET_BYTES))
    if len(secret) != _SECRET_BYTES:
        raise HostUnavailable(
            f"found {len(secret)} bytes in {path}, expected {_SECRET_BYTES}", fix="remove the folder of this file"
        )
    return secret


def _remove(path: str) -> None:
    gone = f"{path}-{secrets.token_hex(4)}"
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def limit_file(path: str) -> None:
    """Shorten the file to its end if it is too large. Writers append to it, so they go on at its new end."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.getsize(path) <= _LARGEST_FILE:
            return
        kept = _tail(path)
        os.truncate(path, 0)
        with open(path, "ab") as file:
            file.write(kept)


def last_lines(path: str) -> str:
    """Return the last lines of the file, or an empty string if there is no file."""
    with contextlib.suppress(FileNotFoundError):
        return "\n".join(_tail(path).decode(errors="replace").splitlines()[-_LAST_LINES:])
    return ""


def _tail(path: str) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _KEPT_BYTES))
        return file.read(_KEPT_BYTES)
