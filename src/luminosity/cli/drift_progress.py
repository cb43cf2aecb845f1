"""The stages of ``lum drift`` on a terminal; elsewhere nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Stages"]


class Stages:
    """One line on standard error that says what is done now, gone when all is."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            TimeElapsedColumn(),
            BarColumn(24),
            TextColumn("{task.description}"),
            TextColumn("{task.fields[more]}"),
            TimeRemainingColumn(compact=True),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: TaskID | None = None

    def __enter__(self) -> Stages:
        self._progress.start()
        self.begin("starting")
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def begin(self, what: str) -> TaskID:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=None, more="")
        return self._task

    def rows(self, what: str) -> Callable[[int], None]:
        """To be called with the rows done so far."""
        task = self.begin(what)
        return lambda done: self._progress.update(task, more=f"{done:,} rows")

    def tiles(self, what: str) -> Callable[[int, int], None]:
        """To be called with what is done and with all there is to do."""
        task = self.begin(what)
        return lambda done, in_all: self._progress.update(task, completed=done, total=in_all)
