"""A model's files on this machine, wherever they come from."""

from __future__ import annotations

import logging
import os
import threading
import time
from urllib.parse import unquote, urlsplit

from apache_beam.io.filesystems import FileSystems

from luminosity._text import format_bytes
from luminosity.errors import ModelUnavailable
from luminosity.inference.files.cache import CacheFolder
from luminosity.inference.files.entry import damage, model_path
from luminosity.inference.files.source import Source, download, find
from luminosity.inference.options import ModelCacheConfig

__all__ = ["local_copy", "use_cache"]

_LOGGER = logging.getLogger("luminosity")

_FETCHES = 3


class _Process:
    """What this process knows: its settings, the models it uses, and those whose contents it has checked."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.config = ModelCacheConfig()
        self.in_use: dict[str, int] = {}  # by entry; held as long as the process lives
        self.checked: set[str] = set()


_process = _Process()


def use_cache(config: ModelCacheConfig) -> None:
    """Say, for this process, where fetched models are kept; without it, the defaults hold."""
    _process.config = config


def local_copy(path: str) -> str:
    """The path on this machine of a model's file or folder, which may lie on any filesystem that Beam knows.

    What is elsewhere (gs://, s3://, hdfs://, a scheme of your own) is fetched once per machine: of several processes
    one fetches, and the others wait. The copy stays until this process ends, and after that until its room is needed.
    A source that has changed is fetched anew. A local path is returned as it is, and so is what is no path at all:
    a name that a library looks up on a model hub.

    >>> local_copy("/models/encoder.pt"), local_copy("file:///models/encoder.pt"), local_copy("org/encoder")
    ('/models/encoder.pt', '/models/encoder.pt', 'org/encoder')
    """
    scheme = FileSystems.get_scheme(path)
    if scheme is None:
        return path
    if scheme == "file":
        return unquote(urlsplit(path).path)
    source = find(path.strip())
    folder = CacheFolder(_process.config)
    entry = folder.entry(source.key)
    lock = folder.use(source.key)
    try:
        _make_whole(source, folder)
        now = time.time_ns()
        os.utime(lock, ns=(now, now))  # by itself the kernel's clock is coarse, and the order of uses counts
        _keep(entry, lock)
    except BaseException:
        os.close(lock)
        raise
    return model_path(entry, source.name)


def _fault(entry: str) -> str | None:
    """What is wrong with the copy; its contents are read once per process."""
    if not os.path.isdir(entry):
        return "it is not there"
    fault = damage(entry, thorough=entry not in _process.checked)
    if fault is None:
        _process.checked.add(entry)
    return fault


def _make_whole(source: Source, folder: CacheFolder) -> None:
    """Fetch what is not there or damaged, unless another process does so first."""
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
        # Another has fetched it. Its contents are read without the lock, by all who waited at the same time.
    raise ModelUnavailable(
        f"the copy of {source.address} in {entry} was damaged {_FETCHES} times; is the disk failing?"
    )


def _fetch(source: Source, folder: CacheFolder) -> None:
    size = format_bytes(source.size)
    with folder.new_entry(source) as empty:
        _LOGGER.info("fetching %s (%s, files: %d) into %s", source.address, size, len(source.files), folder.path)
        began = time.monotonic()
        download(source, empty)
    _LOGGER.info("fetched %s (%s) in %.1f s", source.address, size, time.monotonic() - began)
    _process.checked.add(folder.entry(source.key))  # what was written was hashed on the way


def _identity(entry: str) -> tuple[int, int] | None:
    """Which folder this is; another one of the same name has another."""
    try:
        status = os.stat(entry)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_ctime_ns


def _keep(entry: str, lock: int) -> None:
    """Hold one lock per model for the life of the process."""
    with _process.lock:
        if _process.in_use.setdefault(entry, lock) != lock:
            os.close(lock)
