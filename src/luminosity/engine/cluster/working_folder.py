"""Chooses the files of the working folder, and the user's own modules, that a run sends to the nodes of a cluster."""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType

from luminosity._shared.text import format_bytes

__all__ = ["MODULES", "WORK", "Choice", "choose"]

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
            choice.warnings.append(f"not sent to the nodes: {_some(walk.left_out)}. {_REMEDY}")
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


_ONLY_MODULES = "the modules that this script has imported are sent to the nodes"
_REMEDY = "Start the pipeline in a folder with what it needs, or read data and models from a place that all nodes see"


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
            f"{_shown(folder, parent, name)} (a link to a folder)" for name in sorted(linked) if name[0] != "."
        ]
        for name in sorted(names):
            seen += 1
            if not name.startswith(".") and not name.endswith((".pyc", ".pyo")):
                _add(walk, folder, os.path.join(parent, name))
        if seen > _MOST_SEEN:
            walk.is_too_large = True
            break
    walk.is_too_large |= len(walk.files) > _MOST_FILES or walk.size > _MOST_BYTES
    return walk


def _add(walk: _Walk, folder: str, path: str) -> None:
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


def _shown(folder: str, parent: str, name: str) -> str:
    return os.path.relpath(os.path.join(parent, name), folder)


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


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
