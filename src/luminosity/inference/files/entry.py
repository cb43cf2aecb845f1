"""One fetched model: its files, and a manifest that shows if they are damaged."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from luminosity._shared.file_digest import file_digest

__all__ = ["FileRecord", "damage", "fsync", "model_path", "write_manifest"]

_MANIFEST = "manifest.json"
_FILES = "files"


@dataclass(frozen=True)
class FileRecord:
    """A file's size, time and digest when it was written."""

    relative: str
    size: int
    modified_ns: int
    sha256: str

    @classmethod
    def of(cls, path: str, relative: str, sha256: str) -> FileRecord:
        """Return the record of a file that was just written."""
        status = os.stat(path)
        return cls(relative, status.st_size, status.st_mtime_ns, sha256)


def model_path(entry: str, relative: str) -> str:
    """Return the path of a model's file or folder inside its entry."""
    return os.path.join(entry, _FILES, relative)


def write_manifest(entry: str, address: str, records: list[FileRecord]) -> None:
    """Write the manifest of an entry. It is on disk when this returns."""
    path = os.path.join(entry, _MANIFEST)
    with open(path, "w") as file:
        json.dump({"source": address, "files": [asdict(record) for record in records]}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fsync(entry)


def damage(entry: str, thorough: bool) -> str | None:
    """Return what is wrong with an entry, or None if nothing is.

    Sizes and times are always compared; contents if ``thorough`` is true or the time differs.
    """
    try:
        records = _read_manifest(entry)
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"its manifest can't be read ({error})"
    for record in records:
        path = model_path(entry, record.relative)
        try:
            status = os.stat(path)
            if status.st_size != record.size:
                return f"{record.relative} has {status.st_size:,} bytes, expected {record.size:,}"
            if (thorough or status.st_mtime_ns != record.modified_ns) and file_digest(path) != record.sha256:
                return f"{record.relative} has other contents than were fetched"
        except OSError as error:
            return f"{record.relative} can't be read ({error.strerror})"
    return None


def fsync(path: str) -> None:
    """Write a file's contents, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(entry: str) -> list[FileRecord]:
    with open(os.path.join(entry, _MANIFEST)) as file:
        manifest: dict[str, Any] = json.load(file)
    return [FileRecord(**fields) for fields in manifest["files"]]
