"""Threads that call functions one after the other. Python's own pool refuses work once the main thread has ended."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["Threads"]


class Threads:
    """Up to a number of threads, which start when they are needed. Any thread may use it. The owner closes it."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0
        self._is_closed = False

    def submit(self, call: Callable[[], None]) -> None:
        """Call a function, which raises nothing, on one of the threads. Does nothing after the end."""
        with self._lock:
            if self._is_closed:
                return
            self._calls.put(call)
            if self._idle:
                self._idle -= 1
            elif self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._is_closed:
                call()
            with self._lock:
                self._idle += self._calls.empty()

    def close(self) -> None:
        """Drop the calls that wait, and end the threads after those that run."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._threads):
                self._calls.put(None)
