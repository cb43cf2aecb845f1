"""A step that kills its worker a few times, at known rows, so that a run ends also on a slow machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import apache_beam as beam
import pyarrow as pa

from tests.io.stores.vectors import numbered


class Deadly(beam.DoFn):
    """Emits a batch of numbered rows for each element. At some elements, once, the worker dies ``after_s`` later."""

    def __init__(self, folder: Path, at: set[int], rows: int, after_s: float) -> None:
        """``folder`` gets a file for each kill."""
        self._folder = folder
        self._at = at
        self._rows = rows
        self._after_s = after_s

    def process(self, first: int) -> Iterator[pa.RecordBatch]:
        marker = self._folder / str(first)
        if first in self._at and not marker.exists():
            marker.touch()
            threading.Timer(self._after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        yield numbered(first, self._rows)
