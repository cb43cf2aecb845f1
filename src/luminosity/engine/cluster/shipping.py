"""Sends the user's code and files to the nodes of a cluster, and checks what is installed there.

The driver packs a copy of the working folder, of the user's own modules and of packages to install into one archive,
which the agent of each node unpacks in the run's folder. Luminosity and Beam are not sent: the nodes have them
installed.

The copy has this layout:

    work/           the working folder
    modules/N/      modules that the driver has imported from elsewhere
    packages/       packages and requirements to install: see ``packages.py``
    luminosity-shipped.json    where workers look for modules
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import platform
import socket
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luminosity._shared.model_sizes import SENT_FOLDER_VARIABLE
from luminosity.engine.cluster import packages
from luminosity.engine.cluster.working_folder import WORK, choose

__all__ = ["Packed", "Sent", "check_versions", "pack", "unpack", "versions"]

_CONTENTS = "luminosity-shipped.json"
_COMPRESSED_FROM = 32_000_000  # bytes in all: a network moves less in less time than compressing it takes
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the same files make the same archive
_SAME_EVERYWHERE = ("luminosity", "apache-beam")


@dataclass(frozen=True)
class Packed:
    """What each node needs of a run."""

    archive: bytes = b""
    folder: str = ""  # the working folder
    files: frozenset[str] = frozenset()  # that the archive has of it, relative to it
    warnings: tuple[str, ...] = ()  # what workers in a copy of the folder may miss


def pack(
    *,
    working_folder: str | None = None,
    setup_file: str | None = None,
    requirements_file: str | None = None,
    extra_packages: Sequence[str] = (),
) -> Packed:
    """Return what each node needs of this run.

    Args:
        working_folder: the folder to send; None for the current one.
        setup_file: Beam's ``--setup_file``.
        requirements_file: Beam's ``--requirements_file``.
        extra_packages: Beam's ``--extra_package``.
    """
    folder = os.path.abspath(working_folder or os.getcwd())
    choice = choose(folder)
    archive = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="shipped-luminosity-") as scratch:
        files = choice.files | packages.collect(scratch, setup_file, requirements_file, extra_packages)
        files = {name: path for name, path in files.items() if os.path.isfile(path)}  # others may remove some
        is_small = sum(map(os.path.getsize, files.values())) < _COMPRESSED_FROM
        compression = zipfile.ZIP_STORED if is_small else zipfile.ZIP_DEFLATED
        with zipfile.ZipFile(archive, "w", compression, compresslevel=1) as file:
            for name, path in sorted(files.items()):
                _add(file, name, path, compression)
            contents = {"import_path": choice.import_path, "working_folder": folder}
            file.writestr(zipfile.ZipInfo(_CONTENTS, _LONG_AGO), json.dumps(contents))
    of_folder = frozenset(name.removeprefix(f"{WORK}/") for name in files if name.startswith(f"{WORK}/"))
    return Packed(archive.getvalue(), folder, of_folder, tuple(choice.warnings))


def _add(file: zipfile.ZipFile, name: str, path: str, compression: int) -> None:
    entry = zipfile.ZipInfo(name, _LONG_AGO)
    entry.compress_type = compression
    entry.external_attr = (os.stat(path).st_mode & 0o777) << 16
    with open(path, "rb") as source:
        file.writestr(entry, source.read())


@dataclass(frozen=True)
class Sent:
    """The sent copy on this node."""

    root: str
    source_folder: str  # the driver's folder of which the working folder is a copy
    folders: list[str]  # in which workers look for modules
    working_folder: str  # of workers: the copy, or the driver's own folder
    unpacked_at: float = 0.0  # seconds since 1970
    installed: str = ""  # the folder of packages that were installed, which workers can import, too

    @property
    def is_copy(self) -> bool:
        """Whether workers run in the copy."""
        return self.working_folder != self.source_folder

    def written(self) -> list[str]:
        """Return the files that steps have written to relative paths in the copy, where they end with the run."""
        return sorted(self._written()) if self.is_copy else []

    def _written(self) -> Iterator[str]:
        for folder, folders, names in os.walk(self.working_folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):  # the worker that has written it is still running
                    if os.lstat(path).st_mtime > self.unpacked_at:
                        yield os.path.relpath(path, self.working_folder)

    @property
    def import_path(self) -> list[str]:
        """What comes before the node's own folders in ``sys.path``."""
        return [*self.folders, *filter(None, [self.installed])]

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the environment, which lead models to the copy."""
        return {SENT_FOLDER_VARIABLE: json.dumps([self.source_folder, self.working_folder])}


def unpack(archive: Any, root: str, *, in_place: bool = False) -> Sent:
    """Unpack the archive that :func:`pack` has returned into a new folder.

    ``in_place`` says that this node sees the driver's working folder itself, so that workers need no copy of it.
    """
    made: set[str] = set()
    with zipfile.ZipFile(io.BytesIO(memoryview(archive))) as file:
        for entry in file.infolist():
            if in_place and entry.filename.startswith(f"{WORK}/"):
                continue
            path = os.path.join(root, entry.filename)
            parent = os.path.dirname(path)
            if parent not in made:
                os.makedirs(parent, exist_ok=True)
                made.add(parent)
            mode = (entry.external_attr >> 16 & 0o777) or 0o600
            with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as copy:
                copy.write(file.read(entry))
        contents: dict[str, Any] = json.loads(file.read(_CONTENTS))
    source: str = contents["working_folder"]
    working_folder = source if in_place else os.path.join(root, WORK)
    if not in_place:
        os.makedirs(working_folder, exist_ok=True)  # It is not in the archive if it is empty.
    folders = [
        os.path.normpath(os.path.join(working_folder, os.path.relpath(each, WORK)))
        if each == WORK or each.startswith(f"{WORK}/")
        else os.path.join(root, each)
        for each in contents["import_path"]
    ]
    return Sent(root, source, folders, working_folder, time.time())


def versions() -> dict[str, str]:
    """Return the versions of this process that all nodes must have."""
    found = {name: importlib.metadata.version(name) for name in _SAME_EVERYWHERE}
    return {"Python": ".".join(platform.python_version_tuple()[:2]), **found}


def check_versions(expected: Mapping[str, str]) -> str:
    """Return how this process differs from the driver, whose :func:`versions` are given. Empty if it does not."""
    found = versions()
    wrong = [
        f"{name} {found.get(name, 'missing')} (expected {version})"
        for name, version in expected.items()
        if found.get(name) != version
    ]
    if not wrong:
        return ""
    return f"node {socket.gethostname()} has {', '.join(wrong)}; install the driver's versions on all nodes"
