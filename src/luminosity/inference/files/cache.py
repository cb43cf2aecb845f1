"""The folder of fetched models: what is in it, what is in use, and what must go.

For each model, by its key:

    KEY            the files and their manifest; there only when whole
    KEY.partial    the same while it is being fetched
    KEY.use        locked, together with others, by each process that fetches or uses it; its time is the last use
    KEY.fetch      locked by the one process that fetches it
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Generator

from luminosity._text import format_bytes
from luminosity.errors import ModelUnavailable, OptionError
from luminosity.inference.files import locks
from luminosity.inference.files.entry import fsync
from luminosity.inference.files.source import Source
from luminosity.inference.options import ModelCacheConfig

__all__ = ["CacheFolder"]

_KEY = re.compile(r"([0-9a-f]{32}-\d+)(\.\w+)?")


class CacheFolder:
    def __init__(self, config: ModelCacheConfig) -> None:
        self._config = config
        self.path = _private_folder(config.local_folder())

    def entry(self, key: str) -> str:
        return os.path.join(self.path, key)

    def use(self, key: str) -> int:
        """Keep the model from being evicted until the descriptor is closed, or this process ends."""
        return locks.shared(f"{self.entry(key)}.use", "a model to be removed")

    @contextlib.contextmanager
    def fetching(self, source: Source) -> Generator[None]:
        """Be the one process that fetches this model; the caller holds its `use`."""
        entry = self.entry(source.key)
        with locks.exclusive(f"{entry}.fetch", source.address, lambda: _bytes_in(f"{entry}.partial")):
            yield

    @contextlib.contextmanager
    def new_entry(self, source: Source) -> Generator[str]:
        """An empty folder that becomes the entry, whole, when the context is left without an exception."""
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
        """Remove an entry at once, as seen by others; it is never half there."""
        gone = f"{self.entry(key)}.partial"
        _remove(gone)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.entry(key), gone)
        _remove(gone)

    def _make_room(self, source: Source, partial: str) -> None:
        """Evict what was not used for longest until the model fits, and reserve its bytes."""
        with locks.exclusive(os.path.join(self.path, "lock"), "room in the model cache"):
            _remove(partial)  # of a process that was killed
            self._remove_abandoned()
            present = self._keys()
            held = sum(map(_size, present))
            free = shutil.disk_usage(self.path).free
            limit = self._config.limit_in_bytes(free, held)
            if source.size > limit:
                raise ModelUnavailable(
                    f"{source.address} has {format_bytes(source.size)}, and the model cache {self.path} may hold "
                    f"{format_bytes(limit)}: raise --model_cache_limit, or choose another disk with --model_cache"
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
                    f"{format_bytes(free)} free: raise --model_cache_limit, or choose another disk with --model_cache"
                )
            os.mkdir(partial, 0o700)

    def _keys(self) -> set[str]:
        """Of all models that are there or on their way."""
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
        """Remove a model that nobody uses, and all that belongs to it."""
        entry = self.entry(key)
        with locks.try_exclusive(f"{entry}.use") as is_unused:
            if is_unused:
                self.discard(key)
                for lock in (f"{entry}.fetch", f"{entry}.use"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(lock)
            return is_unused

    def _remove_abandoned(self) -> None:
        """What processes left behind that were killed while they fetched, or could not fetch."""
        named = {match[1] for name in os.listdir(self.path) if (match := _KEY.fullmatch(name))}
        for key in named:
            if not os.path.exists(self.entry(key)):
                self._evict(key)


def _private_folder(path: str) -> str:
    """A folder that nobody else can put a model into: a model is code."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.stat(path)
    except OSError as error:
        message = f"--model_cache={path}: expected a folder that can be written to; {error.strerror or error}"
        raise OptionError(message) from error
    if not stat.S_ISDIR(status.st_mode):
        raise OptionError(f"--model_cache={path}: expected a folder, found a file")
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OptionError(
            f"--model_cache={path}: expected a folder of this user's that nobody else can write to "
            f"(found owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}); name a folder within it"
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
