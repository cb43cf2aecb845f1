"""Calls of Ray on other threads, which end with the run.

Python's own pool of threads refuses work once the main thread has ended.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

__all__ = ["Calls", "Threads"]

_LOGGER = logging.getLogger(__name__)

_END_S = 3.0  # for threads to leave their calls of Ray, before the connection to it is closed


class Calls:
    """Knows which threads are inside Ray. Any thread may use it. The owner closes it."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._count = 0

    @contextlib.contextmanager
    def one(self) -> Generator[bool]:
        """Within the context, :meth:`close` waits for this thread. Gives False if it has been called already."""
        with self._lock:
            may_begin = not self.closed.is_set()
            self._count += may_begin
        try:
            yield may_begin
        finally:
            with self._lock:
                self._count -= may_begin

    def submit(self, threads: Threads, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on one of the threads, unless the run has ended. Does not wait."""
        with self._lock:
            if not self.closed.is_set():
                threads.submit(functools.partial(self._call, function, *arguments))

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with self.one() as may_begin:
            if not may_begin:
                return
            try:
                function(*arguments)
            except Exception:  # the thread would swallow it
                if not self.closed.is_set():
                    _LOGGER.exception("the driver could not handle an event of the cluster")

    def close(self) -> None:
        """Let no more calls begin."""
        with self._lock:
            self.closed.set()

    def wait(self) -> None:
        """Wait until all threads are outside, with a limit."""
        deadline = time.monotonic() + _END_S
        while self._count and time.monotonic() < deadline:
            time.sleep(0.01)


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
