"""Files on any of Beam's file systems; those of this machine without a detour."""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pyarrow as pa
from apache_beam.io.filesystem import BeamIOError, CompressionTypes
from apache_beam.io.filesystems import FileSystems

__all__ = [
    "OutputFile",
    "exists",
    "is_hidden",
    "is_local",
    "join",
    "move",
    "names_in",
    "nearest_folder",
    "new_path",
    "open_input",
    "remove_file",
    "remove_folder",
    "remove_folders_if_empty",
    "size",
    "split",
    "visible_files",
]

_FOLDER_TRIES = 3


def is_local(path: str) -> bool:
    return FileSystems.get_scheme(path) is None


def join(folder: str, *names: str) -> str:
    return posixpath.join(folder, *names)


def split(path: str) -> tuple[str, str]:
    """The folder and the name. Of a relative path the folder may be the current one."""
    folder, name = posixpath.split(path)
    return folder or ".", name


def exists(path: str) -> bool:
    return os.path.lexists(path) if is_local(path) else FileSystems.exists(path)


def size(path: str) -> int:
    if is_local(path):
        return os.path.getsize(path)
    return sum(found.size_in_bytes for result in FileSystems.match([path]) for found in result.metadata_list)


def nearest_folder(path: str) -> str:
    """The folder itself, or the first above it that is there."""
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def names_in(folder: str) -> set[str]:
    """The names of all that is in the folder, hidden or not; of other file systems than this machine's, of files."""
    if not is_local(folder):
        found = (found.path for result in FileSystems.match([join(folder, "**")]) for found in result.metadata_list)
        return {path[len(folder) :].lstrip("/").partition("/")[0] for path in found}
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def new_path(folder: str, suffix: str) -> str:
    """Of a file that nobody else writes, nor an earlier try."""
    return join(folder, f"{uuid4().hex}{suffix}")


def visible_files(folder: str) -> Iterator[str]:
    """The files in the folder and below, relative to it, without those that readers of tables ignore."""
    if not is_local(folder):
        for result in FileSystems.match([join(folder, "**")]):
            for found in result.metadata_list:
                relative = found.path[len(folder) :].lstrip("/")
                if relative and not any(map(is_hidden, relative.split("/"))):
                    yield relative
        return
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for name in sorted(names):
            if not is_hidden(name):
                yield os.path.relpath(os.path.join(place, name), folder)


class OutputFile:
    """A new file, and the folder for it; ``sink`` takes what Arrow's writers write, compressed where asked for."""

    def __init__(self, path: str, compression: str | None) -> None:
        self.path = path
        self._handle: Any = None
        if is_local(path):
            self._file = _local_file(path)
        else:
            make_folder(split(path)[0])
            self._handle = FileSystems.create(path, compression_type=CompressionTypes.UNCOMPRESSED)
            self._file = pa.PythonFile(self._handle, mode="w")
        self.sink = pa.CompressedOutputStream(self._file, compression) if compression else self._file

    def tell(self) -> int:
        """The bytes so far."""
        return self._file.tell()

    def close(self) -> None:
        if not self.sink.closed:
            self.sink.close()
        if not self._file.closed:
            self._file.close()
        if self._handle is not None:
            self._handle.close()

    def abandon(self) -> None:
        """Close and remove it, as far as that can be done."""
        with contextlib.suppress(OSError, ValueError, pa.ArrowException):
            self.close()
        with contextlib.suppress(OSError):
            remove_file(self.path)


def _local_file(path: str) -> Any:
    """Another worker may remove the folder, because it is empty, just when it was made here."""
    for left in reversed(range(_FOLDER_TRIES)):
        make_folder(os.path.dirname(path))
        try:
            return pa.OSFile(path, mode="wb")
        except FileNotFoundError:
            if not left:
                raise
    raise AssertionError("not reached")


def open_input(path: str) -> Any:
    """For Arrow's readers."""
    if is_local(path):
        return pa.OSFile(path, mode="rb")
    return pa.PythonFile(FileSystems.open(path, compression_type=CompressionTypes.UNCOMPRESSED), mode="r")


def make_folder(folder: str) -> None:
    if is_local(folder):
        os.makedirs(folder or ".", exist_ok=True)
        return
    try:
        FileSystems.mkdirs(folder)
    except OSError:  # also where it is there already
        if not FileSystems.exists(folder):
            raise


def move(source: str, destination: str) -> None:
    """Atomic where the file system can; in place of what is there."""
    make_folder(split(destination)[0])
    if is_local(source):
        os.replace(source, destination)
    else:
        FileSystems.rename([source], [destination])


def remove_file(path: str) -> None:
    """It need not be there."""
    if is_local(path):
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        return
    try:
        FileSystems.delete([path])
    except BeamIOError:
        if FileSystems.exists(path):
            raise


def remove_folder(folder: str) -> None:
    """With all that is in it, as far as that can be done: nobody reads it any more."""
    if is_local(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    found = [found.path for result in FileSystems.match([join(folder, "**")]) for found in result.metadata_list]
    with contextlib.suppress(BeamIOError):
        FileSystems.delete(found)
    with contextlib.suppress(BeamIOError):
        FileSystems.delete([folder])


def remove_folders_if_empty(folder: str, top: str) -> None:
    """The folder and those above it, up to ``top``, which stays."""
    while is_local(folder) and folder != top:
        try:
            os.rmdir(folder)
        except OSError:  # not empty, or gone
            return
        folder = os.path.dirname(folder)
