"""Sends the user's code and files to the nodes of a cluster, and checks what is installed there.

The driver chooses the files of the working folder and the user's own modules to send. It packs a copy of them, and of
packages to install, into one archive,
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
import stat
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType
from typing import Any

from luminosity._shared.model_sizes import SENT_FOLDER_VARIABLE
from luminosity._shared.text import format_bytes, list_some
from luminosity.engine.cluster import packages

__all__ = ["Packed", "Sent", "check_versions", "choose", "pack", "unpack", "versions"]

_CONTENTS = "luminosity-shipped.json"
_COMPRESSED_FROM = 32_000_000  # bytes in all: a network moves less in less time than compressing it takes
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the same files make the same archive
_SAME_EVERYWHERE = ("luminosity", "apache-beam")

WORK = "work"  # the folder of the sent copy that is the workers' working folder
MODULES = "modules"  # the folder of the sent copy for modules from elsewhere
_MOST_FILES = 10_000  # a project has hundreds; each is packed here and unpacked on every node
_MOST_BYTES = 200_000_000  # the driver holds the archive in memory, and Ray in its store
_LARGEST_FILE = 100_000_000  # a larger file is data, which nodes read from a place that they all see
_MOST_SEEN = 200_000  # files, after which the walk through a huge folder ends
_NOT_SENT = frozenset({"__pycache__", "node_modules", "site-packages"})
_BUILT = frozenset({"build", "dist"})  # beside a file of _PROJECT
_PROJECT = ("pyproject.toml", "setup.py", "setup.cfg")
_OF_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
_INSTALLED = frozenset({"luminosity", "apache_beam", "ray"})  # the nodes have their own
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LIBRARY_NAMES = frozenset({"site-packages", "dist-packages"})
_MOST_NAMED = 5  # files or folders in a message
_ONLY_MODULES = "the modules that this script has imported are sent to the nodes"
_REMEDY = "Start the pipeline in a folder with what it needs, or read data and models from a place that all nodes see"


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


@dataclass
class Choice:
    """The files to send."""

    files: dict[str, str] = field(default_factory=dict[str, str])
    """The path here, by the path in the sent copy."""
    import_path: list[str] = field(default_factory=list[str])
    """The folders of the sent copy in which workers look for modules."""
    warnings: list[str] = field(default_factory=list[str])


@dataclass
class _Walk:
    """What was found in the working folder."""

    files: dict[str, str] = field(default_factory=dict[str, str])
    size: int = 0
    sizes: Counter[str] = field(default_factory=Counter[str])  # of the entries of the folder
    left_out: list[str] = field(default_factory=list[str])
    is_too_large: bool = False


def choose(folder: str) -> Choice:
    """Return what to send of the working folder and of the folders from which this process imports its own modules.

    That is the whole working folder without hidden files, environments, caches and build outputs, if it is small
    enough; otherwise the modules that this process has imported from it. Modules from other folders are sent, too, if
    they are not installed libraries. ``warnings`` names what a pipeline may miss.
    """
    folder = os.path.abspath(folder)
    choice = Choice()
    if _holds_more_than_a_project(folder):
        message = f"the working folder is {folder}, which holds more than one project"
        choice.warnings.append(f"{message}, so only {_ONLY_MODULES}. {_REMEDY}")
        whole = False
    else:
        walk = _walk(folder)
        whole = not walk.is_too_large
        if whole:
            choice.files = {f"{WORK}/{name}": path for name, path in walk.files.items()}
        else:
            choice.warnings.append(_too_large(folder, walk))
        if whole and walk.left_out:
            choice.warnings.append(f"not sent to the nodes: {list_some(walk.left_out, _MOST_NAMED)}. {_REMEDY}")
    for number, entry in enumerate(_import_folders()):
        relative = os.path.relpath(entry, folder)
        if whole and not relative.startswith(".."):
            choice.import_path.append(os.path.normpath(os.path.join(WORK, relative)))
        elif modules := dict(islice(_imported_from(entry), _MOST_FILES)):
            if len(modules) == _MOST_FILES:
                choice.warnings.append(f"of the Python files in {entry}, only {_MOST_FILES:,} are sent to the nodes")
            place = f"{MODULES}/{number}"
            choice.import_path.append(place)
            choice.files |= {f"{place}/{name}": path for name, path in modules.items()}
    return choice


def _holds_more_than_a_project(folder: str) -> bool:
    """Return whether it is the root, a home folder, or a folder above it: other files there are nobody's business."""
    home = os.path.realpath(os.path.expanduser("~"))
    return os.path.commonpath([os.path.realpath(folder), home]) == os.path.realpath(folder)


def _walk(folder: str) -> _Walk:
    walk, seen = _Walk(), 0
    for parent, folders, names in os.walk(folder):
        is_project = any(name in names for name in _PROJECT)
        linked = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        folders[:] = sorted(
            name
            for name in folders
            if not (name.startswith(".") or name in _NOT_SENT or name.endswith(".egg-info") or name in linked)
            and not (is_project and name in _BUILT)
            and not _is_environment(os.path.join(parent, name))
        )
        walk.left_out += [
            f"{os.path.relpath(os.path.join(parent, name), folder)} (a link to a folder)"
            for name in sorted(linked)
            if name[0] != "."
        ]
        for name in sorted(names):
            seen += 1
            if not name.startswith(".") and not name.endswith((".pyc", ".pyo")):
                _take_up(walk, folder, os.path.join(parent, name))
        if seen > _MOST_SEEN:
            walk.is_too_large = True
            break
    walk.is_too_large |= len(walk.files) > _MOST_FILES or walk.size > _MOST_BYTES
    return walk


def _take_up(walk: _Walk, folder: str, path: str) -> None:
    relative = os.path.relpath(path, folder)
    try:
        status = os.stat(path)
    except OSError:  # A link that leads nowhere, or a file that has just gone.
        return
    if not stat.S_ISREG(status.st_mode):
        return
    if not os.access(path, os.R_OK):
        walk.left_out.append(f"{relative} (not readable)")
    elif status.st_size > _LARGEST_FILE:
        walk.left_out.append(f"{relative} ({format_bytes(status.st_size)})")
    else:
        walk.files[relative] = path
        walk.size += status.st_size
        walk.sizes[relative.partition(os.sep)[0]] += status.st_size


def _is_environment(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in _OF_ENVIRONMENT)


def _too_large(folder: str, walk: _Walk) -> str:
    largest = [f"{name} ({format_bytes(size)})" for name, size in walk.sizes.most_common(_MOST_NAMED)]
    return (
        f"the working folder {folder} has {len(walk.files):,} files and {format_bytes(walk.size)} or more, expected at "
        f"most {_MOST_FILES:,} files and {format_bytes(_MOST_BYTES)}, so only {_ONLY_MODULES}. Largest: "
        f"{', '.join(largest)}. {_REMEDY}"
    )


def _import_folders() -> list[str]:
    """Return the folders from which this process imports modules, in order, without those of installed libraries."""
    folders = [os.path.abspath(entry) for entry in sys.path]
    return [each for each in dict.fromkeys(folders) if os.path.isdir(each) and not _is_installed(each)]


def _is_installed(folder: str) -> bool:
    """Return whether a folder has installed libraries: of this interpreter, of the system, or of the user."""
    return folder.startswith(_LIBRARIES) or not _LIBRARY_NAMES.isdisjoint(folder.split(os.sep))


def _imported_from(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the files of all modules that this process has imported from a folder; of packages, all Python files."""
    for name, module in list(sys.modules.items()):
        if "." in name or name in _INSTALLED or name == "__main__":
            continue
        place = _place(module)
        if place is None or os.path.dirname(place) != folder:
            continue
        if os.path.isfile(place):
            yield os.path.basename(place), place
            continue
        for parent, folders, names in os.walk(place):
            folders[:] = [each for each in folders if not each.startswith(".") and each not in _NOT_SENT]
            for each in names:
                if each.endswith((".py", ".pyi")):
                    path = os.path.join(parent, each)
                    yield os.path.relpath(path, folder), path


def _place(module: ModuleType) -> str | None:
    """Return the file of a module, or the folder of a package."""
    paths: list[str] = list(getattr(module, "__path__", ()))
    if paths:
        return os.path.abspath(paths[0])
    file: str | None = getattr(module, "__file__", None)
    return os.path.abspath(file) if file and file.endswith(".py") else None
