"""The files of a model at an address on a Beam filesystem: finding, downloading and checking them."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

from apache_beam.io.filesystem import BeamIOError, CompressionTypes, FileMetadata
from apache_beam.io.filesystems import FileSystems

from luminosity._shared.shared_files import file_digest, sync_file
from luminosity.errors import ModelUnavailable, may_pass

__all__ = ["Source", "SourceFile", "damage", "download", "find", "model_path"]
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
    sync_file(entry)


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


def _read_manifest(entry: str) -> list[FileRecord]:
    with open(os.path.join(entry, _MANIFEST)) as file:
        manifest: dict[str, Any] = json.load(file)
    return [FileRecord(**fields) for fields in manifest["files"]]


_GLOB = re.compile(r"[*?\[]")
_DEEPEST = 32  # nested folders; more must be a loop
_CHUNK = 4 << 20  # bytes of a file that are read at once
_FILES_AT_ONCE = 4  # large models have many files, and one connection rarely fills the network


def _open(address: str) -> Any:
    # Otherwise Beam decompresses a file whose name ends in .gz, and the copy differs from the model.
    return FileSystems.open(address, compression_type=CompressionTypes.UNCOMPRESSED)


@dataclass(frozen=True)
class SourceFile:
    """A file of a model on its filesystem."""

    address: str
    relative: str
    """Its path inside the local copy."""
    size: int
    updated: float
    """The time of the last change, or 0.0 if the filesystem does not know it."""


@dataclass(frozen=True)
class Source:
    """A model's files as they are now."""

    address: str
    name: str
    """The file or folder with all of them in the local copy. It keeps its suffix, on which libraries rely."""
    files: tuple[SourceFile, ...]
    open_file: Callable[[str], AbstractContextManager[Any]] = field(default=_open, compare=False)
    """Opens the address of a file, to be read as it is stored."""

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def key(self) -> str:
        """A key that differs for each version of the source; it ends in the source's size.

        >>> old, new = (Source("gs://b/m.pt", "m.pt", (SourceFile("gs://b/m.pt", "m.pt", 3, at),)) for at in (1.0, 2.0))
        >>> old.key == new.key, old.key.endswith("-3")
        (False, True)
        """
        identity = [self.address, *([file.address, file.size, file.updated] for file in self.files)]
        return f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}-{self.size}"


def find(address: str) -> Source:
    """Return the files at an address. Raises ``ModelUnavailable`` if there are none."""
    if _GLOB.search(address):
        raise ModelUnavailable(f"{address}: expected the address of one model, found a pattern (one of * ? [)")
    bare = address.rstrip("/")
    name = posixpath.basename(bare) or "model"
    exact = None if address.endswith("/") else _match_one(bare)
    has_folders = FileSystems.get_filesystem(bare).has_dirs()
    if exact and not (has_folders and exact.size_in_bytes == 0):
        return Source(bare, name, (_file(exact, name),))
    # On filesystems with folders, a folder has the size 0; on others, it is only a prefix of file names.
    try:
        within = sorted(_walk(bare, has_folders), key=lambda found: found.path)
    except BeamIOError as error:
        if exact is None:
            raise ModelUnavailable(
                f"{address}: no such file, and no folder that can be listed ({error})",
                may_pass=may_pass(error, in_user_code=False),
            ) from error
        within = []  # an empty file can't be listed
    if within:
        return Source(bare, name, tuple(_file(found, name + found.path[len(bare) :]) for found in within))
    if exact:
        return Source(bare, name, (_file(exact, name),))
    raise ModelUnavailable(f"{address}: no file there, and no folder with files in it", fix="check the spelling")


def _file(found: FileMetadata, relative: str) -> SourceFile:
    if ".." in relative.split("/"):
        raise ModelUnavailable(f"{found.path}: expected a file inside the model's folder, found a path out of it")
    return SourceFile(found.path, relative, found.size_in_bytes, float(found.last_updated_in_seconds or 0.0))


def _match_one(address: str) -> FileMetadata | None:
    found = FileSystems.match([address])[0].metadata_list
    return found[0] if found else None


def _walk(folder: str, has_folders: bool, depth: int = 0) -> Iterator[FileMetadata]:
    """Yield all files below a folder, level by level if a listing shows only one level."""
    if depth == _DEEPEST:
        raise ModelUnavailable(f"{folder}: found folders {_DEEPEST} levels deep, expected a model's folder")
    for found in FileSystems.match([f"{folder}/**"])[0].metadata_list:
        if found.path.endswith("/") or found.path == folder:
            continue  # some tools create such an object to stand for the folder
        # A nested folder is listed with the size 0; an empty file is, too, but has nothing below it.
        nested = list(_below(found.path, depth)) if has_folders and found.size_in_bytes == 0 else []
        yield from nested or [found]


def _below(entry: str, depth: int) -> Iterator[FileMetadata]:
    try:
        yield from _walk(entry, True, depth + 1)
    except BeamIOError:
        return  # an empty file can't be listed


def download(source: Source, into: str) -> None:
    """Write the files and their manifest into an empty folder. Everything is on disk when this returns."""
    stop = threading.Event()
    errors: list[Exception] = []

    def fetch(file: SourceFile) -> FileRecord | None:
        try:
            return _fetch(file, source.open_file, into, stop)
        except Exception as error:
            errors.append(error)
            stop.set()
            return None

    with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(source.files)), "fetch-model") as threads:
        try:
            records = [record for record in threads.map(fetch, source.files) if record is not None]
        finally:
            stop.set()  # stops the other threads if this one is interrupted
    if errors:
        raise errors[0]
    for folder, _, _ in os.walk(into):
        sync_file(folder)
    write_manifest(into, source.address, records)


def _fetch(
    file: SourceFile, open_file: Callable[[str], AbstractContextManager[Any]], into: str, stop: threading.Event
) -> FileRecord | None:
    path = model_path(into, file.relative)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    digest = hashlib.sha256()
    with open_file(file.address) as remote, open(path, "xb") as local:
        while chunk := remote.read(_CHUNK):
            if stop.is_set():
                return None
            digest.update(chunk)
            local.write(chunk)
        local.flush()
        os.fsync(local.fileno())
    record = FileRecord.of(path, file.relative, digest.hexdigest())
    if record.size != file.size:
        raise ModelUnavailable(
            f"{file.address}: found {record.size:,} bytes, expected {file.size:,}; it may have changed while it was "
            "fetched",
            fix="run the pipeline again",
            may_pass=True,
        )
    return record
