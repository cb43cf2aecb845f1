"""The versions of a step's models: looks for new ones among files or in a registry, and chooses when to use them."""

from __future__ import annotations

import logging
import os
import posixpath
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apache_beam.io.filesystems import FileSystems
from apache_beam.ml.inference.base import KeyModelPathMapping, ModelMetadata

from luminosity._shared.text import first_line
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.inference.adapting.adapt import ModelSet
from luminosity.inference.host.interface import Ahead
from luminosity.inference.registry.resolve import resolve
from luminosity.inference.registry.resolved import ResolvedModel

__all__ = [
    "FileWatcher",
    "RegistryWatch",
    "RegistryWatcher",
    "Version",
    "Versions",
    "Watch",
    "Watcher",
    "version_of_all",
    "versions_of_keys",
]
_LOGGER = logging.getLogger(__name__)
_KEY = "{key}"
_MARKER = "_SUCCESS"
"""The file that says, as it does for Hadoop and Spark, that all others of its folder are written."""
_UNFINISHED = (".part", ".partial", ".tmp")
"""Suffixes of folders that are being written. Folders whose names begin with a dot or an underscore are, too."""
_REASON_CHARACTERS = 300


@dataclass(frozen=True)
class Version:
    """A version of a model, by the path of its files; without a path, the one that its handler names."""

    path: str = ""
    name: str = ""
    """Its name in the metrics."""
    registered: ResolvedModel | None = field(default=None, compare=False)
    """The version of a registry; ``path`` then only tells versions apart."""


@dataclass(frozen=True)
class Watch:
    """The files to watch, how often, and until when.

    Times are in seconds, ``until`` and ``since`` since the epoch. A file from before ``since`` is no new version.

    A pattern that ends with ``/`` means folders, and so does one that ends with ``/_SUCCESS``, the name of the file
    that says that its folder is complete.
    """

    pattern: str
    interval: float
    until: float
    since: float = field(default_factory=time.time)

    def pattern_for(self, key: Hashable) -> str:
        """Return the pattern of one key.

        >>> Watch("models/{key}/*.pt", 60, until=0).pattern_for("en")
        'models/en/*.pt'
        """
        return self.pattern.replace(_KEY, str(key))

    @property
    def is_per_key(self) -> bool:
        """Whether the pattern contains ``{key}``."""
        return _KEY in self.pattern

    def watcher(self, keys: Sequence[Hashable]) -> Watcher:
        """Return what looks for new versions of these keys, in this process."""
        return FileWatcher(self, keys)


@dataclass(frozen=True)
class RegistryWatch:
    """The names of models to look up in their registries, by key, how often, and until when."""

    models: Mapping[Hashable, ResolvedModel]
    """The version that each key starts with."""
    interval: float
    until: float

    def watcher(self, keys: Sequence[Hashable]) -> Watcher:
        """Return what looks for new versions, in this process."""
        return RegistryWatcher(self)


class Watcher(ABC):
    """Knows the newest version of each key; a background thread looks for new ones.

    Every worker looks for itself, so this needs no unbounded source and works in bounded pipelines, on any runner.
    There is at most one look at a time, however long it takes.
    """

    def __init__(self, interval: float, until: float) -> None:
        self._interval = interval
        self._until = until
        self._newest: dict[Hashable, Version] = {}
        self._next_look = 0.0
        self._looking = threading.Lock()

    def newest(self, key: Hashable) -> Version:
        """Return a key's newest version, without a path if there is none but the first; does not block."""
        self._look_if_due()
        return self._newest.get(key, Version())

    def look(self) -> None:
        """Look for new versions of all keys now, in this thread, after a look that another thread has begun."""
        with self._looking:  # otherwise an earlier look that ends later would put older versions back
            self._look()

    @abstractmethod
    def _look(self) -> None:
        """Look for new versions of all keys."""

    def _look_if_due(self) -> None:
        now = time.monotonic()
        if now < self._next_look or time.time() > self._until or not self._looking.acquire(blocking=False):
            return
        self._next_look = now + self._interval

        def run() -> None:
            try:
                self._look()
            finally:
                self._looking.release()

        threading.Thread(target=run, name="model-watch", daemon=True).start()


class FileWatcher(Watcher):
    """Looks for files or folders that match a pattern."""

    def __init__(self, watch: Watch, keys: Sequence[Hashable]) -> None:
        super().__init__(watch.interval, watch.until)
        self._watch = watch
        self._keys = keys
        self._warned: set[tuple[str, str]] = set()

    def _look(self) -> None:
        for key in self._keys:
            pattern = self._watch.pattern_for(key)
            try:
                found = _found(pattern)
            except Exception as error:
                # Each file system has its own errors. Keep the known versions; the next look may succeed.
                self._warn_once("error", pattern, f"Could not look for new models at {pattern}: {error}")
                continue
            if not found:
                what = "folder" if pattern.endswith(("/", f"/{_MARKER}")) else "file"
                self._warn_once("empty", pattern, f"No {what} matches watch_model_pattern={pattern} yet.")
            new = [(updated, path) for path, updated in found.items() if updated > self._watch.since]
            if new:
                _, path = max(new)
                self._newest[key] = Version(path, os.path.splitext(os.path.basename(path))[0])

    def _warn_once(self, kind: str, pattern: str, text: str) -> None:
        if (kind, pattern) not in self._warned:
            self._warned.add((kind, pattern))
            _LOGGER.warning("%s", text)


class RegistryWatcher(Watcher):
    """Asks registries for the versions that names stand for.

    A registry that does not answer, or answers nonsense, changes nothing: the model in use stays. The log says so once,
    and once more when the registry is back.
    """

    def __init__(self, watch: RegistryWatch) -> None:
        super().__init__(watch.interval, watch.until)
        self._first = watch.models
        self._failing: set[str] = set()

    def _look(self) -> None:
        versions: dict[str, ResolvedModel | None] = {}
        for key, first in self._first.items():
            if first.name not in versions:
                versions[first.name] = self._ask(first.name)
            found = versions[first.name]
            if found is None:
                continue
            if _is_same(found, first):
                self._newest[key] = Version()
            else:
                self._newest[key] = Version(" ".join(filter(None, found.identity)), found.label, found)

    def _ask(self, name: str) -> ResolvedModel | None:
        try:
            found = resolve(name)
        except Exception as error:  # each registry has its own errors; the next look may succeed
            if name not in self._failing:
                self._failing.add(name)
                reason = first_line(str(error), _REASON_CHARACTERS)
                _LOGGER.warning("Could not look for a new version of %s; the model in use stays: %s", name, reason)
            return None
        if name in self._failing:
            self._failing.discard(name)
            _LOGGER.info("The registry of %s answers again.", name)
        return found


def _is_same(found: ResolvedModel, first: ResolvedModel) -> bool:
    """Return whether two answers of a registry mean the same version.

    A registry without digests gives none; the run has computed that of the first version itself.
    """
    return (found.uri, found.path) == (first.uri, first.path) and found.digest in ("", first.digest)


def _found(pattern: str) -> dict[str, float]:
    """Return the files, or complete folders, that match a pattern, with the times of their last change."""
    if pattern.endswith(f"/{_MARKER}"):
        markers = FileSystems.match([pattern])[0].metadata_list
        return {posixpath.dirname(each.path): each.last_updated_in_seconds for each in markers}
    if not pattern.endswith("/"):
        return {each.path: each.last_updated_in_seconds for each in FileSystems.match([pattern])[0].metadata_list}
    folders: dict[str, float] = {}
    for each in FileSystems.match([f"{pattern}*"])[0].metadata_list:
        folder = posixpath.dirname(each.path)
        name = posixpath.basename(folder)
        if name.startswith((".", "_")) or name.endswith(_UNFINISHED):
            continue
        folders[folder] = max(folders.get(folder, 0.0), each.last_updated_in_seconds)
    return folders


class Versions:
    """Tracks the version of each key of one step."""

    def __init__(
        self,
        load_ahead: Callable[[Hashable, Version, Version | None], Ahead],
        take_over: Callable[[Hashable, Version, Version], None],
        may_lag: bool,
    ) -> None:
        """
        Args:
            load_ahead: requests a version before there is work for it; if it does not fit beside the others, it
                replaces the version given last, if that is not None.
            take_over: moves the waiting examples of the old version to the new one.
            may_lag: whether the old version may be used while the new one is loading.
        """
        self._load_ahead = load_ahead
        self._take_over = take_over
        self._may_lag = may_lag
        self._current: dict[tuple[Hashable, Hashable], Version] = {}
        self._wanted: dict[tuple[Hashable, Hashable], Version] = {}

    def current(self, model: Hashable, key: Hashable) -> Version:
        """Return the version that a key uses now."""
        return self._current.get((model, key), Version())

    def next(self, model: Hashable, key: Hashable, wanted: Version) -> Version:
        """Return the version for the next examples of this key: the wanted one, or the old one until that is loaded."""
        old = self._current.get((model, key))
        self._wanted[model, key] = wanted
        if old is not None and old == wanted:
            return old
        if old is None or not self._may_lag:
            self._current[model, key] = wanted
        else:
            is_last = not self._is_used_by_others(model, key, old)
            # A version that can't be loaded is never used; the host has logged why. A version that does not fit beside
            # the old one replaces it; while other keys need the old one, the two take turns instead.
            if self._load_ahead(model, wanted, old if is_last else None) in (Ahead.READY, Ahead.NO_ROOM):
                self._current[model, key] = wanted
                if is_last:
                    self._take_over(model, old, wanted)
        return self._current[model, key]

    def known(self) -> list[tuple[Hashable, Hashable]]:
        """Return the pairs of model and key that have a version."""
        return list(self._current)

    def needed(self) -> set[tuple[Hashable, str]]:
        """Return the models and paths that any key uses or waits for."""
        both = [*self._current.items(), *self._wanted.items()]
        return {(model, version.path) for (model, _), version in both}

    def _is_used_by_others(self, model: Hashable, key: Hashable, version: Version) -> bool:
        uses = (whose for whose, each in self._current.items() if each.path == version.path)
        return any(whose[0] == model and whose[1] != key for whose in uses)


def version_of_all(metadata: Any) -> Version:
    """Return the version that a side input names for a model without keys.

    >>> version_of_all("models/v2.pt")
    Traceback (most recent call last):
    luminosity.errors.InvalidType: found 'models/v2.pt' in model_metadata_pcoll, expected ModelMetadata(path, name), \
because there are no keys
    """
    if not isinstance(metadata, ModelMetadata):
        raise InvalidType(
            f"found {metadata!r} in model_metadata_pcoll, expected ModelMetadata(path, name), because there are no keys"
        )
    return Version(metadata.model_id, metadata.model_name)


def versions_of_keys(metadata: Any, models: ModelSet) -> Mapping[Hashable, Version]:
    """Return the version that a side input names for each key. Raises if a key has no path, or several."""
    found: dict[Hashable, Version] = {}
    mappings = [metadata] if isinstance(metadata, str | tuple) or not isinstance(metadata, Iterable) else list(metadata)
    for mapping in mappings:
        if mapping is metadata or not isinstance(mapping, KeyModelPathMapping):
            raise InvalidType(
                f"found {mapping!r} in model_metadata_pcoll, expected one element that is a list of "
                "KeyModelPathMapping, because there are keys"
            )
        if not mapping.update_path:
            raise InvalidArgument(f"found an empty path for the keys {mapping.keys} in a model update, expected a path")
        for key in mapping.keys:
            if key in found:
                raise InvalidArgument(
                    f"found the key {key!r} in several mappings of a model update, expected it in one"
                )
            models.name_of_key(key)
            found[key] = Version(mapping.update_path, mapping.model_id)
    missing = [key for key in models.keys if key not in found]
    if missing:
        raise InvalidArgument(
            f"found no path for the key {missing[0]!r} in a model update, expected one for every key of the handler"
        )
    return found
