"""What commands print: tables, a progress line and strict JSON; and the check of the file for ``--report``."""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from luminosity.errors import OptionError

if TYPE_CHECKING:  # rich takes a while to import: not for --help
    from rich.console import Console
    from rich.progress import TaskID

__all__ = ["ProgressLine", "check_report", "json_text", "output_console", "tell_who_reads"]

_PIPED_WIDTH = 120  # columns, where there is no terminal to ask


class ProgressLine:
    """A line on standard error that says what the command does now. It disappears at the end.

    Nothing is printed if standard error is not a terminal.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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

    def __enter__(self) -> ProgressLine:
        self._progress.start()
        self.begin("starting")
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def begin(self, what: str) -> TaskID:
        """Show that the next part of the work begins."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=None, more="")
        return self._task

    def rows(self, what: str) -> Callable[[int], None]:
        """Begin a part of the work, and return a function to call with the number of rows done."""
        task = self.begin(what)
        return lambda done: self._progress.update(task, more=f"{done:,} rows")

    def tiles(self, what: str) -> Callable[[int, int], None]:
        """Begin a part of the work, and return a function to call with the number of tiles done and of all tiles."""
        task = self.begin(what)
        return lambda done, in_all: self._progress.update(task, completed=done, total=in_all)


def output_console() -> Console:
    """Return the console of standard output: as wide as the terminal, or 120 columns in a pipe."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def json_text(value: Any) -> str:
    """Return strict JSON; keys that JSON has no type for, such as dates, are texts."""
    return json.dumps(_strict(value), indent=2, default=str)


def check_report(report: str | None) -> None:
    """Raise an error if the file of ``--report`` can't be written, before any work is done."""
    if report:
        folder = os.path.dirname(os.path.abspath(report))
        if not os.path.isdir(folder) or os.path.isdir(report):
            raise OptionError(f"--report={report}: expected the name of a file in a folder that exists")
        if not os.access(folder, os.W_OK):
            raise OptionError(f"--report={report}: can't write into the folder {folder}")


def tell_who_reads(command: str, report: str, holds: str) -> None:
    """Print that a report shows ``holds`` of the data, if others than its owner can read it."""
    mode = os.stat(report).st_mode
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        who = "every user of this machine" if mode & stat.S_IROTH else "its group"
        print(f"lum {command}: {report} shows {holds} of the data, and {who} can read it", file=sys.stderr)


def _strict(value: Any) -> Any:
    """Replace NaN and infinity, which Python's ``json`` writes and JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {str(name): _strict(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
