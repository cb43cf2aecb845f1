"""Counts how much memory a run's data takes, on one page that all processes of the run share.

Workers write blocks without asking the runner. In order to keep to the budget together, each worker counts what it
writes on the shared page. When there is no room left, workers write to disk instead.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np

__all__ = ["Ledger", "Quota", "WriterQuota"]

_WORD = 8  # bytes of a counter
_PART_FOR_LONG = 0.75  # of the budget, for data that stays long, so that moving data has room
_LIMIT, _RUNNER, _GONE, _FIRST_WRITER = range(4)
_MANY_WRITERS = 200  # are added up more quickly by NumPy, and fewer without it


class Quota:
    """The shared page of counters. Each counter has one writer: the runner, or one worker."""

    def __init__(self, page: mmap.mmap) -> None:
        self.words = memoryview(page).cast("q")
        has_many = len(self.words) > _MANY_WRITERS
        self._written = np.frombuffer(page, np.int64)[_FIRST_WRITER:] if has_many else None

    @classmethod
    def open(cls, path: str) -> Quota:
        """Map a page that exists."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)

    @classmethod
    def create(cls, path: str | None, limit: int, writers: int) -> Quota:
        """Make a page. Without a path, it is visible in this process only."""
        size = _WORD * (_FIRST_WRITER + writers)
        if path is None:
            quota = cls(mmap.mmap(-1, size))
        else:
            Path(path).write_bytes(bytes(size))
            quota = cls.open(path)
        quota.words[_LIMIT] = limit
        return quota

    @property
    def limit(self) -> int:
        """The memory budget in bytes."""
        return self.words[_LIMIT]

    @property
    def used(self) -> int:
        """The bytes in memory, of all processes."""
        written = sum(self.words[_FIRST_WRITER:]) if self._written is None else int(np.add.reduce(self._written))
        return self.words[_RUNNER] + written - self.words[_GONE]


class WriterQuota:
    """The counter of one worker. Any thread of the worker may use it."""

    def __init__(self, path: str, writer: int) -> None:
        self._quota = Quota.open(path)
        self._word = _FIRST_WRITER + writer
        self._lock = threading.Lock()  # several bundles may run in a worker

    @property
    def limit(self) -> int:
        """The memory budget in bytes."""
        return self._quota.limit

    def reserve(self, size: int, part: float = 1.0) -> bool:
        """Count ``size`` bytes as written if ``part`` of the budget has room for them. Returns whether it had."""
        with self._lock:
            if self._quota.used + size > part * self._quota.limit:
                return False
            self._quota.words[self._word] += size
            return True

    def give_back(self, size: int) -> None:
        """Undo a reservation of ``size`` bytes that were not written."""
        with self._lock:
            self._quota.words[self._word] -= size


class Ledger:
    """The runner's side of the counters: memory in use, its peak, and how much was spilled. Any thread may use it."""

    def __init__(self, path: str | None, limit: int, writers: int) -> None:
        self._quota = Quota.create(path, limit, writers)
        self._known = [0] * writers  # bytes of each writer that the runner has received
        self._lock = threading.Lock()
        self._runner = 0
        self._gone = 0
        self.limit = limit
        self.peak = 0
        self.spilled = 0

    @property
    def used(self) -> int:
        """The bytes in memory, of all processes."""
        return self._quota.used

    def hold(self, size: int) -> None:
        """Count bytes that the runner holds from now on, or holds no more if ``size`` is negative."""
        if not size:
            return
        with self._lock:
            self._runner += size
            self._quota.words[_RUNNER] = self._runner
            if size > 0:
                self.peak = max(self.peak, self._quota.used)

    def free(self, size: int) -> None:
        """Count bytes that the runner holds no more."""
        self.hold(-size)

    def try_hold(self, size: int) -> bool:
        """Hold ``size`` bytes for long, if that leaves room for moving data. Returns whether it did."""
        if self.used + size > _PART_FOR_LONG * self.limit:
            return False
        self.hold(size)
        return True

    def received(self, writer: int, size: int) -> None:
        """Take over a worker's file, whose size the worker has counted already."""
        with self._lock:
            self._known[writer] += size
            self.peak = max(self.peak, self._quota.used)

    def gone(self, size: int) -> None:
        """Count a worker's file that is no longer in memory."""
        with self._lock:
            self._gone += size
            self._quota.words[_GONE] = self._gone

    def writer_lost(self, writer: int) -> None:
        """Stop counting the files of a dead worker that the runner has not received."""
        counted = self._quota.words[_FIRST_WRITER + writer]
        self.gone(counted - self._known[writer])
        self._known[writer] = counted

    def add_spilled(self, size: int) -> None:
        """Count bytes that were written to disk."""
        with self._lock:
            self.spilled += size
