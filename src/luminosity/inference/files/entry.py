"""One fetched model: its files, and a manifest by which damage to them is found."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["FileRecord", "damage", "fsync", "model_path", "write_manifest"]

CHUNK = 4 << 20

_MANIFEST = "manifest.json"
_FILES = "files"


@dataclass(frozen=True)
class FileRecord:
    """A file as it was when it was written."""

    relative: str
    size: int
    modified_ns: int
    sha256: str

    @classmethod
    def of(cls, path: str, relative: str, sha256: str) -> FileRecord:
        status = os.stat(path)
        return cls(relative, status.st_size, status.st_mtime_ns, sha256)


def model_path(entry: str, relative: str) -> str:
    return os.path.join(entry, _FILES, relative)


def write_manifest(entry: str, address: str, records: list[FileRecord]) -> None:
    path = os.path.join(entry, _MANIFEST)
    with open(path, "w") as file:
        json.dump({"source": address, "files": [asdict(record) for record in records]}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fsync(entry)


def damage(entry: str, thorough: bool) -> str | None:
    """What is wrong with the entry, in words; None where all is well.

    Sizes and times are looked at always; contents where `thorough`, or where those differ.
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
            if (thorough or status.st_mtime_ns != record.modified_ns) and _sha256(path) != record.sha256:
                return f"{record.relative} has other contents than were fetched"
        except OSError as error:
            return f"{record.relative} can't be read ({error.strerror})"
    return None


def fsync(path: str) -> None:
    """Make a folder's names, or a file's contents, outlive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(entry: str) -> list[FileRecord]:
    with open(os.path.join(entry, _MANIFEST)) as file:
        manifest: dict[str, Any] = json.load(file)
    return [FileRecord(**fields) for fields in manifest["files"]]


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
