"""Looks for new versions of a model among files, in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from apache_beam.io.filesystems import FileSystems

__all__ = ["Watch", "Watcher"]

_LOGGER = logging.getLogger(__name__)
_KEY = "{key}"


@dataclass(frozen=True)
class Watch:
    """The files to watch, how often, and until when.

    Times are in seconds, ``until`` and ``since`` since the epoch. A file from before ``since`` is no new version.
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


class Watcher:
    """Knows the newest file of each key; a background thread looks for new ones.

    Every worker looks for itself, so this needs no unbounded source and works in bounded pipelines, on any runner.
    """

    def __init__(self, watch: Watch, keys: Sequence[Hashable]) -> None:
        self._watch = watch
        self._keys = keys
        self._newest: dict[Hashable, str] = {}
        self._next_look = 0.0
        self._looking = threading.Lock()
        self._warned: set[tuple[str, str]] = set()

    def newest(self, key: Hashable) -> str:
        """Return the path of a key's newest version, or an empty string; does not block."""
        self._look_if_due()
        return self._newest.get(key, "")

    def look(self) -> None:
        """Look for new versions of all keys now, in this thread."""
        for key in self._keys:
            pattern = self._watch.pattern_for(key)
            try:
                found = FileSystems.match([pattern])[0].metadata_list
            except Exception as error:
                # Each file system has its own errors. Keep the known versions; the next look may succeed.
                self._warn_once("error", pattern, f"Could not look for new models at {pattern}: {error}")
                continue
            if not found:
                self._warn_once("empty", pattern, f"No file matches watch_model_pattern={pattern} yet.")
            new = [each for each in found if each.last_updated_in_seconds > self._watch.since]
            if new:
                self._newest[key] = max(new, key=lambda each: (each.last_updated_in_seconds, each.path)).path

    def _look_if_due(self) -> None:
        now = time.monotonic()
        if now < self._next_look or time.time() > self._watch.until or not self._looking.acquire(blocking=False):
            return
        self._next_look = now + self._watch.interval

        def run() -> None:
            try:
                self.look()
            finally:
                self._looking.release()

        threading.Thread(target=run, name="model-watch", daemon=True).start()

    def _warn_once(self, kind: str, pattern: str, text: str) -> None:
        if (kind, pattern) not in self._warned:
            self._warned.add((kind, pattern))
            _LOGGER.warning("%s", text)
