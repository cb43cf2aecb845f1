"""One page that all processes of a run see: how much memory the run's data takes.

Workers write blocks without asking the runner. So that they keep to the budget together, each counts what it writes
where the others and the runner see it; when there is no room, they write to disk instead.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

_WORD = 8
_PART_FOR_LONG = 0.75
_LIMIT, _RUNNER, _GONE, _FIRST_WRITER = range(4)


class Quota:
    """The page. Each word has a single writer: the runner those of its own, each worker one."""

    def __init__(self, page: mmap.mmap) -> None:
        self.words = memoryview(page).cast("q")

    @classmethod
    def open(cls, path: str) -> Quota:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)

    @classmethod
    def create(cls, path: str | None, limit: int, writers: int) -> Quota:
        """Without a path it is this process's own."""
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
        return self.words[_LIMIT]

    @property
    def used(self) -> int:
        return self.words[_RUNNER] + sum(self.words[_FIRST_WRITER:]) - self.words[_GONE]


class WriterQuota:
    """A worker's side."""

    def __init__(self, path: str, writer: int) -> None:
        self._quota = Quota.open(path)
        self._word = _FIRST_WRITER + writer
        self._lock = threading.Lock()  # several bundles may run in a worker

    def reserve(self, size: int) -> bool:
        """Count ``size`` bytes as written, if there is room for them."""
        with self._lock:
            if self._quota.used + size > self._quota.limit:
                return False
            self._quota.words[self._word] += size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self._quota.words[self._word] -= size


class Ledger:
    """The runner's side: all that the engine holds, and what became of what it did not."""

    def __init__(self, path: str | None, limit: int, writers: int) -> None:
        self._quota = Quota.create(path, limit, writers)
        self._known = [0] * writers  # of what each writer has counted, what the runner has heard of
        self._lock = threading.Lock()
        self._runner = 0
        self._gone = 0
        self.limit = limit
        self.peak = 0
        self.spilled = 0

    @property
    def used(self) -> int:
        return self._quota.used

    def hold(self, size: int) -> None:
        """Count bytes that the runner itself holds from now on."""
        with self._lock:
            self._runner += size
            self._quota.words[_RUNNER] = self._runner
            self.peak = max(self.peak, self._quota.used)

    def free(self, size: int) -> None:
        self.hold(-size)

    def try_hold(self, size: int) -> bool:
        """Hold ``size`` bytes for long, if that leaves room for what moves."""
        if self.used + size > _PART_FOR_LONG * self.limit:
            return False
        self.hold(size)
        return True

    def received(self, writer: int, size: int) -> None:
        """A worker's file, which it has counted itself, is the runner's now."""
        with self._lock:
            self._known[writer] += size
            self.peak = max(self.peak, self._quota.used)

    def gone(self, size: int) -> None:
        """A worker's file has left memory."""
        with self._lock:
            self._gone += size
            self._quota.words[_GONE] = self._gone

    def writer_lost(self, writer: int) -> None:
        """What a dead worker had counted and not told of is gone."""
        counted = self._quota.words[_FIRST_WRITER + writer]
        self.gone(counted - self._known[writer])
        self._known[writer] = counted

    def add_spilled(self, size: int) -> None:
        with self._lock:
            self.spilled += size
