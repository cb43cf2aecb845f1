"""Local paths in a worker whose node does not see the driver's files: Beam's file systems refuse what would be lost.

Beam's sources and sinks, and ours, open local files through ``LocalFileSystem``. In a copy of the working folder, a
relative path that is not there would mean no rows, and what is written there ends with the run.
"""

from __future__ import annotations

import functools
import glob
import logging
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from luminosity.errors import PathNotShared

if TYPE_CHECKING:
    from apache_beam.io.filesystem import MatchResult

__all__ = ["LocalPaths", "guard"]

_LOGGER = logging.getLogger(__name__)

_FIX = "use a path that all nodes see, such as a folder on NFS, or a bucket (gs://, s3://)"
_OF_ONE_MACHINE = re.compile(  # kinds of file systems; others are on a network, or may be
    "bcachefs|btrfs|ext[234]|f2fs|overlay|ramfs|reiserfs|rootfs|tmpfs|xfs|zfs"
)
_MOUNTS = "/proc/self/mountinfo"


@dataclass(frozen=True)
class LocalPaths:
    """What a worker does not share with the driver."""

    source: str  # the driver's working folder
    is_apart: bool = False  # whether the node is another machine
    shared: Sequence[str] = ()  # folders that are the same on all nodes
    copy: str = ""  # of the driver's working folder, in which the worker runs; empty if it runs in that folder itself


def guard(paths: LocalPaths) -> None:
    """Let Beam's file system of local files refuse or name, in this process, what the driver's machine does not see."""
    from apache_beam.io.localfilesystem import LocalFileSystem  # the agent imports this module, and has no Beam

    guarded = _Guard(paths)
    system: Any = LocalFileSystem
    for name in ("create", "mkdirs"):
        _before(system, name, guarded.written)
    for name in ("copy", "rename"):
        _before(system, name, guarded.moved)
    for name in ("open", "size", "metadata", "last_updated", "checksum"):
        _before(system, name, guarded.read)
    real = system.match

    @functools.wraps(real)
    def match(self: Any, patterns: Sequence[str], *more: Any, **named: Any) -> list[MatchResult]:
        found: list[MatchResult] = real(self, patterns, *more, **named)
        for each in found:
            if not each.metadata_list:
                guarded.not_found(each.pattern)
        return found

    system.match = match


def _before(system: Any, name: str, check: Callable[..., object]) -> None:
    real = getattr(system, name)

    @functools.wraps(real)
    def checked(self: Any, *arguments: Any, **named: Any) -> Any:
        check(*arguments)
        return real(self, *arguments, **named)

    setattr(system, name, checked)


class _Guard:
    """Knows which paths are in the copy of the working folder."""

    def __init__(self, paths: LocalPaths) -> None:
        self._paths = paths
        self._told: set[str] = set()  # what the log has: a step may have a million paths

    def read(self, path: str, *_: Any) -> None:
        """Refuse a relative path that is not in the copy."""
        if self._is_relative(path) and not os.path.exists(path):
            raise PathNotShared(f"found no {path} {self._where()}", fix=_FIX)

    def not_found(self, pattern: str) -> None:
        """Refuse a relative pattern without files; name another one in the log."""
        if self._is_relative(pattern):
            raise PathNotShared(f"found no file that matches {pattern} {self._where()}", fix=_FIX)
        if not self._paths.is_apart or not glob.has_magic(pattern):
            return  # the source itself says that a file is missing
        folder = os.path.dirname(pattern)
        while glob.has_magic(folder):
            folder = os.path.dirname(folder)
        if not os.path.isdir(folder) and _is_of_one_machine(folder):
            raise PathNotShared(f"found no folder {folder} on node {socket.gethostname()} for {pattern}", fix=_FIX)
        self._tell(
            "read", f"found no file that matches {pattern} on node {socket.gethostname()}; the driver may have some"
        )

    def moved(self, _: Sequence[str], destinations: Sequence[str]) -> None:
        """Refuse to move or copy files into the copy of the folder."""
        for path in destinations:
            self.written(path)

    def written(self, path: str, *_: Any) -> None:
        """Refuse to write into the copy, which is removed; name a folder that only this node may have."""
        if self._is_relative(path):
            raise PathNotShared(
                f"found that a step writes to {path}, a relative path, expected an absolute one: not all nodes see the "
                f"driver's working folder {self._paths.source}, and the copy of it on this node ends with the run",
                fix=_FIX,
            )
        folder = os.path.dirname(os.path.abspath(path))
        if self._paths.is_apart and not self._is_shared(folder) and _is_of_one_machine(folder):
            self._tell(
                "written",
                f"a step writes to {folder} on a disk of node {socket.gethostname()}, which others do not see",
            )

    def _is_relative(self, path: str) -> bool:
        """Return whether a path is relative to the copy. Beam makes some of them absolute."""
        copy = self._paths.copy
        return bool(copy) and (not os.path.isabs(path) or os.path.abspath(path).startswith(os.path.join(copy, "")))

    def _is_shared(self, folder: str) -> bool:
        return any(os.path.commonpath([folder, each]) == each for each in self._paths.shared)

    def _where(self) -> str:
        return (
            f"in the copy of the driver's working folder {self._paths.source} on node {socket.gethostname()}: only "
            "what lies in that folder is copied, without hidden files, linked folders and files above 100 MB"
        )

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            _LOGGER.warning("%s. To fix this: %s", message, _FIX)


def _is_of_one_machine(folder: str) -> bool:
    """Return whether a folder, which may not exist yet, is on a file system that no other machine sees."""
    best, kind = "", ""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                left, _, right = line.partition(" - ")
                point = left.split(" ")[4]
                if len(point) >= len(best) and os.path.commonpath([folder, point]) == point:
                    best, kind = point, right.split(" ")[0]
    except OSError:
        return False  # it may be shared
    return _OF_ONE_MACHINE.fullmatch(kind) is not None
