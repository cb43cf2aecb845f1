"""The file that says who did what to which run from the page, and how it went: one line of JSON an action."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
from collections.abc import Generator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from luminosity._shared.shared_files import is_own_file, locked, replace_file

__all__ = ["Audit"]

_MOST_BYTES = 1_000_000  # some 4,000 actions
_KEPT_BYTES = _MOST_BYTES // 2  # the newest lines, when the file is full
_MOST_TEXT = 300  # characters of a text in a line
_LOCK_S = 5.0  # another server writes one line
_MOST_SHOWN = 20


class Audit:
    """The file of this user in a folder of records. Any thread, and several servers, may write it at once.

    Only this user can read it. When it is full, its older half goes.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"page-actions-{os.geteuid()}.jsonl"

    def check(self) -> None:
        """Raise ``OSError`` if no line can be written: then nothing may be done either."""
        with self._opened():
            pass

    def write(self, run: str, action: str, result: str, *, user: str = "", **more: str) -> None:
        """Write a line. ``user`` is who has signed in; by default this user. Raises ``OSError``."""
        line = {
            "at": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
            "user": user[:_MOST_TEXT] or _user(),
            "run": run,
            "action": action,
            **{name: value[:_MOST_TEXT] for name, value in more.items() if value},
            "result": result[:_MOST_TEXT],
        }
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with self._opened() as descriptor:
            if os.fstat(descriptor).st_size + len(data) <= _MOST_BYTES:
                os.write(descriptor, data)
                return
            newest = self.path.read_bytes()[-_KEPT_BYTES:].partition(b"\n")[2]
            replace_file(self.path, newest + data, is_private=True)

    def lines(self, run: str) -> list[dict[str, Any]]:
        """Return the newest lines about a run, the last one first."""
        try:
            with self._opened(for_reading=True) as descriptor:
                size = os.fstat(descriptor).st_size
                content = os.pread(descriptor, size, 0)
        except OSError:
            return []  # nothing was done yet
        found: list[dict[str, Any]] = []
        for line in reversed(content.splitlines()):
            with contextlib.suppress(ValueError):
                data = json.loads(line)
                if isinstance(data, dict) and data.get("run") == run:
                    found.append(data)
            if len(found) == _MOST_SHOWN:
                break
        return found

    @contextlib.contextmanager
    def _opened(self, *, for_reading: bool = False) -> Generator[int]:
        """Open the file and hold its lock. Raises ``OSError`` if it is not this user's."""
        flags = os.O_RDONLY if for_reading else os.O_RDWR | os.O_APPEND | os.O_CREAT
        while True:
            descriptor = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            try:
                if not is_own_file(descriptor):
                    raise PermissionError(f"{self.path} is not a file of this user")
                with locked(descriptor, _LOCK_S):
                    if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                        yield descriptor
                        return
            finally:
                os.close(descriptor)  # another server has replaced the file


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())  # in a container, users may have no name
