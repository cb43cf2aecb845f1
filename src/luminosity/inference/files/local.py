"""Local paths of model files, wherever they come from, and the folder of fetched models.

A fetched model with the key KEY has these files:

    KEY            the model's files and their manifest; exists only when complete
    KEY.partial    the same while it is being fetched
    KEY.use        locked, shared, by each process that fetches or uses the model; its time is the last use
    KEY.fetch      locked by the process that fetches the model
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Generator
from urllib.parse import unquote, urlsplit

from apache_beam.io.filesystems import FileSystems

from luminosity._shared.model_sizes import SENT_FOLDER_VARIABLE
from luminosity._shared.shared_files import evict_until, sync_file
from luminosity._shared.text import format_bytes
from luminosity.errors import ModelUnavailable, OptionError
from luminosity.inference.files import locks
from luminosity.inference.files.source import Source, damage, download, find, model_path
from luminosity.inference.options import ModelCacheConfig

__all__ = ["cached_copy", "check_exists", "local_copy", "near_path", "use_cache"]
_LOGGER = logging.getLogger(__name__)
_FETCHES = 3  # how often a damaged copy is replaced before the disk is blamed


class _Process:
    """The cache settings of this process, the models it uses, and the entries whose contents it has checked."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.config = ModelCacheConfig()
        self.in_use: dict[str, int] = {}  # lock descriptors by entry, held until the process ends
        self.checked: set[str] = set()


_process = _Process()


def use_cache(config: ModelCacheConfig) -> None:
    """Set where this process keeps fetched models. Without this call, the defaults apply."""
    _process.config = config


def local_copy(path: str) -> str:
    """Return the local path of a model's file or folder, which may be on any filesystem that Beam knows.

    A model on another filesystem (gs://, s3://, hdfs://, or your own scheme) is fetched once per machine: one process
    fetches it, and the others wait. The copy is kept until this process ends, and then until its space is needed. If
    the source has changed, it is fetched again. A local path is returned unchanged, and so is a name on a model hub; on
    a node of a cluster, a path in the driver's working folder becomes one in the copy that was sent to the node.

    >>> local_copy("/models/encoder.pt"), local_copy("file:///models/encoder.pt"), local_copy("org/encoder")
    ('/models/encoder.pt', '/models/encoder.pt', 'org/encoder')
    """
    scheme = FileSystems.get_scheme(path)
    if scheme is None:
        return _sent_copy(path)
    if scheme == "file":
        return _sent_copy(unquote(urlsplit(path).path))
    return cached_copy(find(path.strip()))


def _sent_copy(path: str) -> str:
    folders = os.environ.get(SENT_FOLDER_VARIABLE)
    if not folders or not os.path.isabs(path) or os.path.exists(path):
        return path
    driver, here = json.loads(folders)
    if os.path.commonpath([driver, path]) != driver:
        return path
    return os.path.join(here, os.path.relpath(path, driver))


def cached_copy(source: Source) -> str:
    """Return the local path of a model's files, which are fetched into the cache unless they are there."""
    folder = CacheFolder(_process.config)
    entry = folder.entry(source.key)
    lock = folder.use(source.key)
    try:
        _make_whole(source, folder)
        now = time.time_ns()
        os.utime(lock, ns=(now, now))  # the kernel's own timestamps are too coarse to order uses
        _keep(entry, lock)
    except BaseException:
        os.close(lock)
        raise
    return model_path(entry, source.name)


def check_exists(path: str) -> None:
    """Raise ``ModelUnavailable`` if ``path`` is a local path at which there is no file or folder.

    A path on another file system is not looked at: that may take long, and needs the rights that workers have.
    """
    scheme = FileSystems.get_scheme(path)
    if scheme not in (None, "file"):
        return
    local = path if scheme is None else local_copy(path)
    if not os.path.exists(local):
        found = os.path.abspath(local)
        raise ModelUnavailable(f"{path!r}: found no file or folder {found!r}", fix=near_path(local) or None)


def near_path(path: str) -> str:
    """Return a question that suggests a path with a similar name, or an empty string if there is none.

    >>> near_path("/usr/bim"), near_path("/usr/none-such")
    ("did you mean '/usr/bin'?", '')
    """
    expanded = os.path.expanduser(path)
    if expanded != path and os.path.exists(expanded):
        return f"pass {expanded!r}: `~` is not expanded"
    folder, name = os.path.split(path.rstrip("/"))
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return ""
    near = difflib.get_close_matches(name, names, n=1)  # by the name alone: the folder is the same
    return f"did you mean {os.path.join(folder, near[0])!r}?" if near else ""


def _fault(entry: str) -> str | None:
    """Return what is wrong with the copy. Each process reads its contents once."""
    if not os.path.isdir(entry):
        return "it is missing"
    fault = damage(entry, thorough=entry not in _process.checked)
    if fault is None:
        _process.checked.add(entry)
    return fault


def _make_whole(source: Source, folder: CacheFolder) -> None:
    """Fetch the model if it is missing or damaged, unless another process does so first."""
    entry = folder.entry(source.key)
    for _ in range(_FETCHES):
        seen = _identity(entry)
        fault = _fault(entry)
        if fault is None:
            return
        with folder.fetching(source):
            if _identity(entry) == seen:
                if seen:
                    _LOGGER.warning(
                        "the copy of %s in %s is damaged: %s. Fetching it again", source.address, entry, fault
                    )
                    folder.discard(source.key)
                _fetch(source, folder)
                return
        # Another process has fetched it. All waiting processes check its contents at once, without the lock.
    raise ModelUnavailable(
        f"the copy of {source.address} in {entry} was damaged {_FETCHES} times",
        fix="check the disk, or choose another one with --model_cache",
    )


def _fetch(source: Source, folder: CacheFolder) -> None:
    size = format_bytes(source.size)
    with folder.new_entry(source) as empty:
        _LOGGER.info("fetching %s (%s, files: %d) into %s", source.address, size, len(source.files), folder.path)
        began = time.monotonic()
        download(source, empty)
    _LOGGER.info("fetched %s (%s) in %.1f s", source.address, size, time.monotonic() - began)
    _process.checked.add(folder.entry(source.key))  # its contents were hashed while they were written


def _identity(entry: str) -> tuple[int, int] | None:
    """Return what identifies this folder; a new folder of the same name differs."""
    try:
        status = os.stat(entry)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_ctime_ns


def _keep(entry: str, lock: int) -> None:
    """Hold one lock per model until the process ends."""
    with _process.lock:
        if _process.in_use.setdefault(entry, lock) != lock:
            os.close(lock)


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
            sync_file(self.path)
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
            freed = evict_until(
                lambda freed: held - freed + source.size <= limit and source.size <= free + freed,
                [(self._last_use(key), _size(key), key) for key in present],
                self._evict,
            )
            held, free = held - freed, free + freed
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
