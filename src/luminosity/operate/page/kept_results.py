"""What was made from files, kept until they change."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from luminosity.runs.records import FileVersion, version_of

__all__ = ["FOREVER", "KeptResults"]

FOREVER = float("inf")

V = TypeVar("V")


class KeptResults(Generic[V]):
    """The results of a function of a file, up to a number of them; the one unused for longest goes first.

    May be used on several threads.
    """

    def __init__(self, make: Callable[[Path], tuple[V, float]], most: int) -> None:
        """``make`` returns a result for a file, and for how many seconds it counts if the file does not change."""
        self._make = make
        self._most = most
        self._lock = threading.Lock()
        self._held: OrderedDict[Path, tuple[FileVersion, float, V]] = OrderedDict()

    def get(self, path: Path) -> V | None:
        """Return the result for a file, or None if there is no file."""
        version = version_of(path)
        if version is None:
            return None
        with self._lock:
            held = self._held.get(path)
            if held is not None and held[0] == version and time.monotonic() < held[1]:
                self._held.move_to_end(path)
                return held[2]
        value, seconds = self._make(path)
        with self._lock:
            self._held[path] = (version, time.monotonic() + seconds, value)
            self._held.move_to_end(path)
            while len(self._held) > self._most:
                self._held.popitem(last=False)
        return value
