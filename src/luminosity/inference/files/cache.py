"""The folder of fetched models: its entries, the locks of processes that use them, and eviction.

A model with the key KEY has these files:

    KEY            the model's files and their manifest; exists only when complete
    KEY.partial    the same while it is being fetched
    KEY.use        locked, shared, by each process that fetches or uses the model; its time is the last use
    KEY.fetch      locked by the process that fetches the model
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Generator

from luminosity._shared.text import format_bytes
from luminosity.errors import ModelUnavailable, OptionError
from luminosity.inference.files import locks
from luminosity.inference.files.entry import fsync
from luminosity.inference.files.source import Source
from luminosity.inference.options import ModelCacheConfig

__all__ = ["CacheFolder"]

_KEY = re.compile(r"([0-9a-f]{32}-\d+)(\.\w+)?")


_MAKE_ROOM = "raise --model_cache_limit, or choose another disk with --model_cache"


class CacheFolder:
    """The folder of fetched models, shared by all processes of a user on this machine."""

    def __init__(self, config: ModelCacheConfig) -> None:
        self._config = config
        self.path = _private_folder(config.local_folder())

    def entry(self, key: str) -> str:
        """Return the path of a model's entry."""
        return os.path.join(self.path, key)

    def use(self, key: str) -> int:
        """Keep a model from being evicted until the returned descriptor is closed or this process ends."""
        return locks.shared(f"{self.entry(key)}.use", "a model to be removed")

    @contextlib.contextmanager
    def fetching(self, source: Source) -> Generator[None]:
        """Hold the lock of the one process that fetches this model. The caller holds its ``use`` lock."""
        entry = self.entry(source.key)
        with locks.exclusive(f"{entry}.fetch", source.address, lambda: _bytes_in(f"{entry}.partial")):
            yield

    @contextlib.contextmanager
    def new_entry(self, source: Source) -> Generator[str]:
        """Yield an empty folder, which becomes the entry if the ``with`` block ends without an exception."""
        entry = self.entry(source.key)
        partial = f"{entry}.partial"
        self._make_room(source, partial)
        try:
            yield partial
            os.rename(partial, entry)
            fsync(self.path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def discard(self, key: str) -> None:
        """Remove an entry. Other processes see either all of it or nothing."""
        gone = f"{self.entry(key)}.partial"
        _remove(gone)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.entry(key), gone)
        _remove(gone)

    def _make_room(self, source: Source, partial: str) -> None:
        """Evict least recently used models until the new one fits, and reserve its bytes."""
        with locks.exclusive(os.path.join(self.path, "lock"), "room in the model cache"):
            _remove(partial)  # left by a process that was killed
            self._remove_abandoned()
            present = self._keys()
            held = sum(map(_size, present))
            free = shutil.disk_usage(self.path).free
            limit = self._config.limit_in_bytes(free, held)
            if source.size > limit:
                raise ModelUnavailable(
                    f"{source.address} has {format_bytes(source.size)}, and the model cache {self.path} may hold "
                    f"{format_bytes(limit)}",
                    fix=_MAKE_ROOM,
                )
            for key in sorted(present, key=self._last_use):
                if held + source.size <= limit and source.size <= free:
                    break
                if self._evict(key):
                    held -= _size(key)
                    free += _size(key)
            if held + source.size > limit or source.size > free:
                raise ModelUnavailable(
                    f"{source.address} has {format_bytes(source.size)}; the model cache {self.path} may hold "
                    f"{format_bytes(limit)}, of which {format_bytes(held)} are in use now, and its disk has "
                    f"{format_bytes(free)} free",
                    fix=_MAKE_ROOM,
                )
            os.mkdir(partial, 0o700)

    def _keys(self) -> set[str]:
        """Return the keys of all models that are complete or being fetched."""
        return {
            match[1]
            for name in os.listdir(self.path)
            if (match := _KEY.fullmatch(name)) and match[2] in (None, ".partial")
        }

    def _last_use(self, key: str) -> int:
        try:
            return os.stat(f"{self.entry(key)}.use").st_mtime_ns
        except FileNotFoundError:
            return 0

    def _evict(self, key: str) -> bool:
        """Remove a model and its lock files unless a process uses it; return whether it was removed."""
        entry = self.entry(key)
        with locks.try_exclusive(f"{entry}.use") as is_unused:
            if is_unused:
                self.discard(key)
                for lock in (f"{entry}.fetch", f"{entry}.use"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(lock)
            return is_unused

    def _remove_abandoned(self) -> None:
        """Remove the lock files and partial entries of processes that were killed or failed while they fetched."""
        named = {match[1] for name in os.listdir(self.path) if (match := _KEY.fullmatch(name))}
        for key in named:
            if not os.path.exists(self.entry(key)):
                self._evict(key)


def _private_folder(path: str) -> str:
    """Return a folder to which only this user can write: loading a model can run code."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.stat(path)
    except OSError as error:
        message = f"--model_cache={path}: expected a folder that can be written to: {error.strerror or error}"
        raise OptionError(message) from error
    if not stat.S_ISDIR(status.st_mode):
        raise OptionError(f"--model_cache={path}: expected a folder, found a file")
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OptionError(
            f"--model_cache={path}: expected a folder that belongs to this user and that no other user can write to "
            f"(found owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o})",
            fix="name a folder inside it",
        )
    return path


def _size(key: str) -> int:
    return int(key.rpartition("-")[2])


def _bytes_in(folder: str) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _remove(folder: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
