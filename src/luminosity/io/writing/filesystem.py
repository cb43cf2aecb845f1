"""Files on any of Beam's file systems, and clear errors about them; local files are accessed without Beam."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import shutil
from collections.abc import Generator, Iterator
from typing import Any
from uuid import uuid4

import pyarrow as pa
from apache_beam.io.filesystem import BeamIOError, CompressionTypes
from apache_beam.io.filesystems import FileSystems

from luminosity._shared.shared_files import sync_file
from luminosity._shared.text import format_bytes
from luminosity.errors import Fix, WriteError, may_pass

__all__ = [
    "OutputFile",
    "clear_errors",
    "exists",
    "is_hidden",
    "is_local",
    "join",
    "make_folder",
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
    "sync",
    "visible_files",
]

_FOLDER_ATTEMPTS = 3  # other workers may remove a new folder, but not again and again


def is_local(path: str) -> bool:
    """Return whether a path is on this machine: it has no scheme."""
    return FileSystems.get_scheme(path) is None


def join(folder: str, *names: str) -> str:
    """Join with slashes, on every file system."""
    return posixpath.join(folder, *names)


def split(path: str) -> tuple[str, str]:
    """Return the folder and the name; the folder of a bare name is ``.``."""
    folder, name = posixpath.split(path)
    return folder or ".", name


def exists(path: str) -> bool:
    """Return whether a file or folder exists."""
    return os.path.lexists(path) if is_local(path) else FileSystems.exists(path)


def size(path: str) -> int:
    """Return the bytes of a file."""
    if is_local(path):
        return os.path.getsize(path)
    return sum(found.size_in_bytes for result in FileSystems.match([path]) for found in result.metadata_list)


def nearest_folder(path: str) -> str:
    """Return the folder itself, or the nearest folder above it that exists."""
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def is_hidden(name: str) -> bool:
    """Return whether readers of tables ignore a file or folder of this name."""
    return name.startswith((".", "_"))


def names_in(folder: str) -> set[str]:
    """Return the names of all files and folders in the folder; remote file systems only know folders with files."""
    if not is_local(folder):
        found = (found.path for result in FileSystems.match([join(folder, "**")]) for found in result.metadata_list)
        return {path[len(folder) :].lstrip("/").partition("/")[0] for path in found}
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def new_path(folder: str, suffix: str) -> str:
    """Return a path that no other process and no earlier attempt writes to."""
    return join(folder, f"{uuid4().hex}{suffix}")


def visible_files(folder: str) -> Iterator[str]:
    """Yield the paths of the files in the folder and below, relative to it, except those that readers ignore."""
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
    """A new file; its folder is made if needed. Arrow's writers write to ``sink``, which compresses if asked to."""

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
        """Return the bytes written so far."""
        return self._file.tell()

    def close(self) -> None:
        """Finish the file."""
        if not self.sink.closed:
            self.sink.close()
        if not self._file.closed:
            self._file.close()
        if self._handle is not None:
            self._handle.close()

    def abandon(self) -> None:
        """Close and remove the file, ignoring errors."""
        with contextlib.suppress(OSError, ValueError, pa.ArrowException):
            self.close()
        with contextlib.suppress(OSError):
            remove_file(self.path)


def _local_file(path: str) -> Any:
    """Open a file. Another worker may remove the empty folder right after it was made here: try again then."""
    for left in reversed(range(_FOLDER_ATTEMPTS)):
        make_folder(os.path.dirname(path))
        try:
            return pa.OSFile(path, mode="wb")
        except FileNotFoundError:
            if not left:
                raise
    raise AssertionError("not reached")


def sync(*paths: str) -> None:
    """Make files, or the names in folders, survive a power loss. Other file systems than this machine's do anyway."""
    for path in paths:
        if is_local(path):
            sync_file(path)


def open_input(path: str) -> Any:
    """Open a file for Arrow's readers."""
    if is_local(path):
        return pa.OSFile(path, mode="rb")
    return pa.PythonFile(FileSystems.open(path, compression_type=CompressionTypes.UNCOMPRESSED), mode="r")


def make_folder(folder: str) -> None:
    """Make a folder and those above it, unless they exist."""
    if is_local(folder):
        os.makedirs(folder or ".", exist_ok=True)
        return
    try:
        FileSystems.mkdirs(folder)
    except OSError:  # Beam raises also if the folder exists.
        if not FileSystems.exists(folder):
            raise


def move(source: str, destination: str) -> None:
    """Move a file over an existing one, atomically if the file system can."""
    make_folder(split(destination)[0])
    if is_local(source):
        os.replace(source, destination)
    else:
        FileSystems.rename([source], [destination])


def remove_file(path: str) -> None:
    """Remove a file if it exists."""
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
    """Remove a folder with its contents, ignoring errors: nothing reads it any more."""
    if is_local(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    found = [found.path for result in FileSystems.match([join(folder, "**")]) for found in result.metadata_list]
    with contextlib.suppress(BeamIOError):
        FileSystems.delete(found)
    with contextlib.suppress(BeamIOError):
        FileSystems.delete([folder])


def remove_folders_if_empty(folder: str, top: str) -> None:
    """Remove the folder and those above it while they are empty, up to ``top``, which stays."""
    while is_local(folder) and folder != top:
        try:
            os.rmdir(folder)
        except OSError:  # The folder is not empty, or gone.
            return
        folder = os.path.dirname(folder)


_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FOLDER = (errno.ENOTDIR, errno.EEXIST)
_ANOTHER_PATH = "choose another path"
_FREE_SPACE = Fix(
    "free some space, write to a larger disk, or pass compression='zstd', which takes the least space",
    command="free some space, or write to a larger disk",
)


@contextlib.contextmanager
def clear_errors(path: str) -> Generator[None]:
    """Turn the errors of a file system into a ``WriteError`` about the table at ``path``."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise _explained(path, error) from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise WriteError(f"{path}: the table can't be written in this format: {error}") from error


def _explained(path: str, error: OSError) -> WriteError:
    cause = _cause(error)
    number = cause.errno if isinstance(cause, OSError) else None
    if number in _FULL:
        message = f"{path}: the disk is full ({_free_space(path)}); no incomplete files of the table are left"
        return WriteError(message, fix=_FREE_SPACE)
    if number in _FORBIDDEN:
        reason = "the disk is read-only" if number == errno.EROFS else "this user may not write there"
        return WriteError(f"{path}: {reason} ({cause})", fix="choose another folder, or change its owner or mode")
    if number in _NO_FOLDER:
        return WriteError(f"{path}: found a file in this path, expected folders ({cause})", fix=_ANOTHER_PATH)
    is_outage = not is_local(path) and may_pass(cause, in_user_code=False)
    fix = _ANOTHER_PATH if is_local(path) else None
    return WriteError(f"{path}: can't be written: {cause}", fix=fix, may_pass=is_outage)


def _cause(error: OSError) -> BaseException:
    """Return the first of the errors that Beam collects for several files, or the error that it wraps."""
    details = error.exception_details if isinstance(error, BeamIOError) else None
    if details:
        found = next(iter(details.values()))
        return _cause(found) if isinstance(found, OSError) else found or error
    inner = error.args[0] if error.args else None
    return _cause(inner) if isinstance(inner, OSError) else error


def _free_space(path: str) -> str:
    if not is_local(path):
        return "its free space is unknown"
    try:
        usage = shutil.disk_usage(nearest_folder(path))
    except OSError as error:
        return str(error)
    return f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free"
