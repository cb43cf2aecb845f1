"""Graphs of models on this machine's disk, for one user: each is made once, and the oldest go when there are many."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable

from luminosity._shared.shared_files import evict_until, is_own_file, replace_file, who_else_writes
from luminosity.inference.options import cache_folder

__all__ = ["kept_graph"]
_LOGGER = logging.getLogger(__name__)

_LIMIT = 4_000_000_000  # bytes of all files
_DIGEST_BYTES = 32  # before the content of each file: a file that was damaged is made again


def kept_graph(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the content that has this name, made now if there is none. Any number of processes may do so at once.

    Without a folder that is the user's alone, it is made each time, and a line of the log says why.
    """
    folder = _private_folder()
    path = None if folder is None else os.path.join(folder, f"{name}.onnx")
    content = None if path is None else _read(path)
    if content is None:
        content = make()
        if path is not None:
            _write(path, content)
    return content


def _private_folder() -> str | None:
    folder = cache_folder("int8")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        others = who_else_writes(folder)
    except OSError as error:
        others = str(error)
    if others:
        _LOGGER.warning("The int8 weights are not kept: %s. Remove %s, or make it yours alone.", others, folder)
        return None
    return folder


def _read(path: str) -> bytes | None:
    """Return a file's content, or None if there is no file that is whole."""
    try:
        with open(path, "rb") as file:
            if not is_own_file(file.fileno()):
                _LOGGER.warning("%s is not yours: the int8 weights are made again.", path)
                return None
            digest, content = file.read(_DIGEST_BYTES), file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        _LOGGER.warning("%s can't be read (%s): the int8 weights are made again.", path, error)
        return None
    if hashlib.sha256(content).digest() != digest:
        _LOGGER.warning("%s is damaged: the int8 weights are made again.", path)
        return None
    with contextlib.suppress(OSError):  # another process may have removed it
        os.utime(path)  # the oldest are those that are not used
    return content


def _write(path: str, content: bytes) -> None:
    try:
        replace_file(path, hashlib.sha256(content).digest() + content, is_private=True, has_writers=True)
        _remove_oldest(os.path.dirname(path), path)
    except OSError as error:
        _LOGGER.warning("The int8 weights are not kept in %s: %s.", path, error)


def _remove_oldest(folder: str, newest: str) -> None:
    """Remove the files that are not used for the longest time until all others fit into the limit."""
    found: list[tuple[float, int, str]] = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            status = entry.stat(follow_symlinks=False)
            found.append((status.st_mtime, status.st_size, entry.path))
    total = sum(size for _, size, _ in found)

    def remove(path: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        return True

    evict_until(lambda freed: total - freed <= _LIMIT, (each for each in found if each[2] != newest), remove)
