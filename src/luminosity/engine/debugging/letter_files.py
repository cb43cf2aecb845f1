"""Lines of JSON in the files of a folder, which have a limit and survive a crash."""

from __future__ import annotations

import os
import time

__all__ = ["LetterFiles"]

_FILE_BYTES = 16_000_000  # then the next file begins
_MOST_BYTES = 1_000_000_000  # of one run: what fails at everything must not fill the disk


class LetterFiles:
    """Appends lines to files that only their user can read. Use it on one thread. Files appear with the first line."""

    def __init__(self, folder: str, kind: str) -> None:
        """``kind`` begins the names of the files."""
        self.folder = folder
        self.path = ""  # of the last file
        self.bytes = 0  # of all files of this run
        self._kind = kind
        self._begun = time.strftime("%Y%m%d-%H%M%S")
        self._files = 0
        self._file_bytes = 0  # of the last one

    def has_room(self, lines: bytes) -> bool:
        """Return whether the limit of a run leaves room for more lines."""
        return self.bytes + len(lines) <= _MOST_BYTES

    def append(self, lines: bytes) -> None:
        """Append lines, which are on the disk when this returns. Raises ``OSError``."""
        is_new = not self.path or self._file_bytes >= _FILE_BYTES
        if is_new:
            self._files += 1
            self._file_bytes = 0
            name = f"{self._kind}-{self._begun}-{os.getpid()}-{self._files}.jsonl"
            self.path = os.path.join(self.folder, name)
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
        with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(self.folder)
        self.bytes += len(lines)
        self._file_bytes += len(lines)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
