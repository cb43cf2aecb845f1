"""Where a copy lies: a folder, or any other place that Beam's file systems write to. Objects are written as a whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Generator, Iterable, Iterator
from typing import Any, Protocol

from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems

from luminosity._shared.shared_files import sync_file
from luminosity.beam_fixes.kept_s3_clients import keep_s3_clients
from luminosity.errors import CheckpointError, CopyError, Fix

__all__ = ["Place", "place_at"]

_PIECE_BYTES = 1 << 20  # read or written at once
_UNFINISHED = ".unfinished"  # behind the name of a file that is being written


class Place(Protocol):
    """Holds objects by name. All methods raise :class:`CopyError` if the place can't be reached. Any thread may use it.

    Names have no slashes.
    """

    address: str

    def read(self, name: str) -> Iterator[bytes] | None:
        """Return the pieces of an object, or None if there is no such object."""
        ...

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write an object in place of the one that has the name. Readers find the old one or the new one."""
        ...

    def remove(self, names: Collection[str]) -> None:
        """Remove objects. Those that are gone already are left out."""
        ...

    def names(self) -> set[str]:
        """Return the names of all objects."""
        ...


def place_at(address: str) -> Place:
    """Return the place at a URL or a path. Raises :class:`CheckpointError` if no file system is known for it."""
    scheme = FileSystems.get_scheme(address)
    if scheme in (None, "file"):
        return _Folder(os.path.abspath(os.path.expanduser(address.removeprefix("file://"))))
    if scheme == "s3":
        keep_s3_clients()
    try:
        FileSystems.get_filesystem(address)
    except Exception as error:  # Beam and the libraries that it imports raise what they like
        raise CheckpointError(
            f"{address}: no file system is known for {scheme}://, or its library is not installed ({error})",
            fix=Fix(
                "install Beam with the extra of the cloud, such as apache-beam[aws], or name a folder",
                command="pip install 'apache-beam[aws]' (or [gcp], [azure]), or name a folder",
            ),
        ) from error
    return _Store(address.rstrip("/"))


class _Folder:
    """A folder. What is written there survives a power loss of the machine that has the disk."""

    def __init__(self, path: str) -> None:
        self.address = path

    def read(self, name: str) -> Iterator[bytes] | None:
        with _reaching(self.address):
            try:
                file = open(os.path.join(self.address, name), "rb", buffering=0)  # noqa: SIM115  # _pieces closes it
            except FileNotFoundError:
                return None
        return _pieces(file, self.address)

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        path = os.path.join(self.address, name)
        unfinished = path + _UNFINISHED
        with _reaching(self.address):
            os.makedirs(self.address, mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(unfinished, flags, 0o600)
        with open(descriptor, "wb") as file:
            for piece in pieces:  # outside of _reaching: their errors are not of this place
                with _reaching(self.address):
                    file.write(piece)
            with _reaching(self.address):
                file.flush()
                os.fsync(file.fileno())
        with _reaching(self.address):
            os.replace(unfinished, path)
            sync_file(self.address)

    def remove(self, names: Collection[str]) -> None:
        with _reaching(self.address):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.address, name))

    def names(self) -> set[str]:
        with _reaching(self.address):
            try:
                return set(os.listdir(self.address))
            except FileNotFoundError:
                return set()


class _Store:
    """A place of Beam's file systems, in which an object appears once it is complete."""

    def __init__(self, address: str) -> None:
        self.address = address

    def read(self, name: str) -> Iterator[bytes] | None:
        path = f"{self.address}/{name}"
        with _reaching(self.address):
            if not FileSystems.exists(path):
                return None
            file: Any = FileSystems.open(path, compression_type=CompressionTypes.UNCOMPRESSED)
        return _pieces(file, self.address)

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        path = f"{self.address}/{name}"
        with _reaching(self.address):
            file: Any = FileSystems.create(path, compression_type=CompressionTypes.UNCOMPRESSED)
        for piece in pieces:  # If this fails, the file is not closed, and no object appears.
            with _reaching(self.address):
                file.write(piece)
        with _reaching(self.address):
            file.close()

    def remove(self, names: Collection[str]) -> None:
        with _reaching(self.address):
            if gone := sorted(set(names) & self.names()):
                FileSystems.delete([f"{self.address}/{name}" for name in gone])

    def names(self) -> set[str]:
        with _reaching(self.address):
            found: Any = FileSystems.match([f"{self.address}/*"])[0].metadata_list
            return {str(each.path).rpartition("/")[2] for each in found}


def _pieces(file: Any, address: str) -> Iterator[bytes]:
    with contextlib.closing(file):
        while True:
            with _reaching(address):
                piece: bytes = file.read(_PIECE_BYTES)
            if not piece:
                return
            yield piece


@contextlib.contextmanager
def _reaching(address: str) -> Generator[None]:
    """Raise ``CopyError`` in place of what file systems and their libraries raise."""
    try:
        yield
    except CopyError:
        raise
    except Exception as error:  # each file system has errors of its own
        said = str(error).strip().partition("\n")[0]
        raise CopyError(f"{address} can't be reached: {type(error).__name__}: {said}", may_pass=True) from error
