"""Looks for new versions of a model among files, beside the work."""

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
    """Which files to look at, how often, and until when; what was there before `since` is no new version."""

    pattern: str
    interval: float
    until: float
    since: float = field(default_factory=time.time)

    def pattern_for(self, key: Hashable) -> str:
        """
        >>> Watch("models/{key}/*.pt", 60, until=0).pattern_for("en")
        'models/en/*.pt'
        """
        return self.pattern.replace(_KEY, str(key))

    @property
    def is_per_key(self) -> bool:
        return _KEY in self.pattern


class Watcher:
    """The newest file for each key. Whoever asks gets what is known; the looking is done by a thread beside.

    Every worker looks for itself: no unbounded source is needed, so it works in bounded pipelines, on any runner.
    """

    def __init__(self, watch: Watch, keys: Sequence[Hashable]) -> None:
        self._watch = watch
        self._keys = keys
        self._newest: dict[Hashable, str] = {}
        self._next_look = 0.0
        self._looking = threading.Lock()
        self._told: set[tuple[str, str]] = set()

    def newest(self, key: Hashable) -> str:
        """The path of its newest version; nothing where there is none yet."""
        self._look_if_due()
        return self._newest.get(key, "")

    def look(self) -> None:
        """Once, now."""
        for key in self._keys:
            pattern = self._watch.pattern_for(key)
            try:
                found = FileSystems.match([pattern])[0].metadata_list
            except Exception as error:  # Of any store. The versions known so far stay; the next look may do better.
                self._tell_once("error", pattern, f"Could not look for new models at {pattern}: {error}")
                continue
            if not found:
                self._tell_once("empty", pattern, f"No file matches watch_model_pattern={pattern} so far.")
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

    def _tell_once(self, kind: str, pattern: str, text: str) -> None:
        if (kind, pattern) not in self._told:
            self._told.add((kind, pattern))
            _LOGGER.warning("%s", text)
