"""What a run takes from the world outside: time, threads, and the queue that its loop waits for.

The loop and its data ask only what they are given here, so that a simulation can run them in a world of its own.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

__all__ = ["THIS_MACHINE", "Clock", "Condition", "Mailbox", "ManualClock", "StartThread", "Task", "WallClock", "World"]


class Clock(Protocol):
    """Tells the time: the processing time of a pipeline, and the time by which the loop schedules."""

    def micros(self) -> int:
        """Return the processing time in microseconds since 1970."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        ...

    def time(self) -> float:
        """Return the seconds since 1970, which a later process understands, too."""
        ...

    def thread_time(self) -> float:
        """Return the CPU seconds of the calling thread."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait."""
        ...


class WallClock:
    """The machine's clock."""

    monotonic = staticmethod(time.monotonic)
    thread_time = staticmethod(time.thread_time)
    sleep = staticmethod(time.sleep)
    time = staticmethod(time.time)

    def micros(self) -> int:
        """Return the processing time in microseconds since 1970."""
        return time.time_ns() // 1000


class ManualClock:
    """A clock whose processing time stands still until it is moved. All else is as by ``clock``.

    It starts at 0, as the tests of pipelines expect.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._micros = 0
        clock = clock or WallClock()
        self.monotonic = clock.monotonic
        self.time = clock.time
        self.thread_time = clock.thread_time
        self.sleep = clock.sleep

    def micros(self) -> int:
        """Return the processing time in microseconds since 1970."""
        return self._micros

    def advance(self, micros: int) -> None:
        """Move the processing time forward."""
        self._micros += micros


class Task(Protocol):
    """A thread, or what stands for one in a simulation."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or until the timeout."""
        ...


class Condition(Protocol):
    """A lock, and a change for which threads wait, with the methods of ``threading.Condition``."""

    def __enter__(self) -> bool:
        """Take the lock."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        """Release the lock."""
        ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until the predicate holds, or until the timeout. Returns whether it holds."""
        ...

    def notify_all(self) -> None:
        """Let all that wait look at their predicate again."""
        ...


class Mailbox(Protocol):
    """The queue of messages to the loop, with the methods of ``queue.SimpleQueue``."""

    def put(self, item: Any) -> None:
        """Add a message. Never blocks."""
        ...

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the oldest message. Raises ``queue.Empty`` if there is none, after the timeout if ``block`` is set."""
        ...

    def get_nowait(self) -> Any:
        """Return the oldest message. Raises ``queue.Empty`` if there is none."""
        ...

    def empty(self) -> bool:
        """Return whether there is no message."""
        ...


StartThread = Callable[[Callable[[], None], str], Task]


def _start_thread(run: Callable[[], None], name: str) -> Task:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


_WALL_CLOCK = WallClock()


@dataclass(frozen=True)
class World:
    """The world of a run: by default, this machine."""

    clock: Clock = _WALL_CLOCK
    start_thread: StartThread = _start_thread  # runs a function beside the loop
    token: Callable[[int], str] = secrets.token_hex  # makes a name of so many bytes that nothing else has
    mailbox: Callable[[], Mailbox] = queue.SimpleQueue  # makes a queue for what other threads tell the loop
    condition: Callable[[], Condition] = threading.Condition  # makes what the loop and a thread beside it wait with


THIS_MACHINE = World()
