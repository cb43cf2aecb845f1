"""Threads that answer requests, and how many requests may wait for one."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from luminosity.inference.serving.errors import RequestError

__all__ = ["Workers"]

T = TypeVar("T")


class Workers:
    """The threads are daemons: one that a model never returns to does not keep the process."""

    def __init__(self, threads: int, waiting: int) -> None:
        self._places = threads + waiting
        self._taken = 0
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        for number in range(threads):
            threading.Thread(target=self._work, name=f"serve-{number}", daemon=True).start()

    @contextlib.contextmanager
    def place(self) -> Generator[None]:
        """For one request, from before its body is read. Belongs to the event loop's thread."""
        if self._taken >= self._places:
            raise RequestError(503, f"{self._taken} requests are here already, which is all that may be; try again")
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1

    async def run(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._tasks.put((future, function))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            future, function = self._tasks.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
