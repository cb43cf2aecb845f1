"""What ``lum enrich`` shows: rows done, their rate and the time left while it runs, and a report at its end."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apache_beam.metrics.metric import MetricResults
from rich.console import Console
from rich.table import Table
from rich.text import Text

from luminosity import ReadTable
from luminosity._shared.text import shorten
from luminosity.cli.common.exits import print_ignoring_closed_pipe
from luminosity.core import InferenceMetrics
from luminosity.events import Event, RunEnded, Snapshot
from luminosity.runs.views import words
from luminosity.runs.views.live import Terminal

if TYPE_CHECKING:
    from luminosity.io.reading.readers import RowCount

__all__ = ["Report", "RowProgress", "print_report"]

_APPEARS_AFTER_S = 1.0  # a shorter run shows nothing
_FIRST_LINE_AFTER_S = 5.0
_LINE_EVERY_S = 10.0  # few enough lines for a log
_LINE_EVERY_AT_MOST_S = 60.0  # in a run that takes hours
_PART_OF_ELAPSED = 0.1  # of the run, between two lines: a log grows with the logarithm of the run's length at first
_RECENT_S = 60.0  # of which the rate is measured: some bundles take seconds
_MICROSECONDS = 1e6
_CELL_CHARACTERS = 60  # wider columns would leave no room for others
_NUMBERS_SHOWN = 3  # of a vector: enough to see that it is one


class RowProgress:
    """Shows the progress of the run whose events it gets: one line that changes, or lines of text.

    The engine calls it, on one thread. ``models`` is the number of new columns: a row is done when it has all of them.
    """

    def __init__(self, models: int, total: RowCount | None, is_line: bool) -> None:
        self._models = models
        self._total = total
        self._recent: deque[tuple[float, int]] = deque()
        self._terminal = Terminal() if is_line else None
        self._has_terminal = False
        self._next_at = _FIRST_LINE_AFTER_S
        self._is_broken = False

    def __call__(self, event: Event) -> None:
        """Show the progress if the event brings news about it."""
        if self._is_broken:
            return
        try:
            if isinstance(event, Snapshot):
                self._take(event)
            elif isinstance(event, RunEnded):
                self._leave()
        except (OSError, ValueError):
            self._is_broken = True  # standard error is closed; the run goes on

    def _take(self, snapshot: Snapshot) -> None:
        done = self._done(snapshot)
        if not self._recent or done > self._recent[-1][1]:
            self._recent.append((snapshot.seconds, done))
        while len(self._recent) > 2 and self._recent[0][0] < snapshot.seconds - _RECENT_S:
            self._recent.popleft()
        if self._terminal is not None and snapshot.seconds >= _APPEARS_AFTER_S:
            if not self._has_terminal:
                self._terminal.take()
                self._has_terminal = True
            self._terminal.show(Text(shorten(self.text(snapshot, done), self._terminal.console.size.width - 1)))
        elif self._terminal is None and snapshot.seconds >= self._next_at:
            pause = min(_LINE_EVERY_AT_MOST_S, max(_LINE_EVERY_S, _PART_OF_ELAPSED * snapshot.seconds))
            self._next_at = snapshot.seconds + pause
            sys.stderr.write(self.text(snapshot, done) + "\n")
            sys.stderr.flush()

    def _leave(self) -> None:
        if self._terminal is not None and self._has_terminal:
            self._terminal.give_back()

    def _done(self, snapshot: Snapshot) -> int:
        """Return how many rows have gone through all models."""
        rows = [view.inferences for stage in snapshot.stages for view in stage.inference]
        return min(rows) if len(rows) == self._models else 0

    def text(self, snapshot: Snapshot, done: int) -> str:
        """Return the progress in one line."""
        after = f"lum enrich {words.duration(snapshot.seconds)}: "
        if not done:
            return after + "starting, no row is done yet"
        parts = [f"{done:,} rows"]
        if self._total is not None and self._total.rows >= done:
            about = "" if self._total.is_exact else "about "
            parts = [f"{done:,} of {about}{self._total.rows:,} rows ({done / self._total.rows:.0%})"]
        rate = self._rate(snapshot.seconds)
        if rate:
            parts.append(f"{rate:,.0f} rows/s" if rate >= 10 else f"{rate:.2g} rows/s")
            if self._total is not None and self._total.rows > done:
                parts.append(f"about {words.duration((self._total.rows - done) / rate)} left")
        return after + " · ".join(parts)

    def _rate(self, seconds: float) -> float:
        """Return the rows a second of the last minute."""
        began, rows = self._recent[0]
        return (self._recent[-1][1] - rows) / (seconds - began) if seconds > began else 0.0


@dataclass(frozen=True)
class Report:
    """What a run has added and where it has written, for its report."""

    columns: Sequence[str]
    out: str
    dead_letters: str | None = None
    stored: str = ""  # in which collection of which store
    show: int | None = None  # rows of OUT to print


def print_report(report: Report, metrics: MetricResults, seconds: float) -> int:
    """Print how many rows each model processed and where they were written; with ``--show``, also some rows.

    Returns the number of rows that were written to ``OUT``.
    """
    console = Console(highlight=False)
    models, written, unreadable = _counts(metrics)
    shown = [_rows(report.out, report.show)] if report.show is not None and written["Write"] else []
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name in report.columns:
        grid.add_row(Text(name), Text(_model(models[name])))
    # Without rows, no file is written.
    grid.add_row("written", Text(f"{_many(written['Write'])} to {report.out}" if written["Write"] else "nothing"))
    if report.dead_letters is not None:
        failed = written["DeadLetters"]
        lines = f" ({unreadable:,} {'line' if unreadable == 1 else 'lines'} unreadable)" if unreadable else ""
        grid.add_row("failed", Text(f"{_many(failed)}, in {report.dead_letters}{lines}" if failed else "none"))
    if report.stored:
        grid.add_row("stored", Text(report.stored))
    grid.add_row("took", Text(f"{seconds:.1f} s, including start-up"))
    with console.capture() as printed:
        for each in (*shown, grid):
            console.print(each)
    # The table is written: a reader that has closed the pipe, or a full disk, must not make the command fail.
    print_ignoring_closed_pipe("\n".join(line.rstrip() for line in printed.get().rstrip("\n").split("\n")))
    return written["Write"]


def _counts(metrics: MetricResults) -> tuple[dict[str, Counter[str]], Counter[str], int]:
    """Return the counters of each new column's model, the rows of each writing step, and the unreadable lines."""
    unreadable = 0
    models: dict[str, Counter[str]] = defaultdict(Counter)
    written: Counter[str] = Counter()
    for counter in metrics.query()["counters"]:
        metric = counter.key.metric
        if metric.name in InferenceMetrics.ALL:
            models[metric.namespace][metric.name] += counter.result
        elif metric.name == "rows_written":
            written[counter.key.step.partition("/")[0]] += counter.result
        elif metric.name == "lines_unreadable":
            unreadable += counter.result
    return models, written, unreadable


def _model(counts: Counter[str]) -> str:
    rows, seconds = counts[InferenceMetrics.EXAMPLES], counts[InferenceMetrics.COMPUTE] / _MICROSECONDS
    padded = counts[InferenceMetrics.PADDED_COST]
    parts = [_many(rows)]
    if seconds:
        parts.append(f"{rows / seconds:,.0f} per second of computing")
    if padded > counts[InferenceMetrics.USEFUL_COST]:
        parts.append(f"padding {1 - counts[InferenceMetrics.USEFUL_COST] / padded:.0%}")
    return " · ".join(parts)


def _many(rows: int) -> str:
    return f"{rows:,} {'row' if rows == 1 else 'rows'}"


def _rows(out: str, count: int) -> Table:
    batches = ReadTable(out).first(count)
    table = Table()
    for name in batches[0].schema.names if batches else ():
        table.add_column(Text(name), overflow="fold")
    for batch in batches:
        for row in batch.to_pylist():
            table.add_row(*(Text(_cell(value)) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    """Return a value as text that fits into a cell.

    >>> _cell([0.25, 0.5, 0.75, 1.0]), _cell({"label": "good", "score": 0.98765, "scores": {}}), _cell("x" * 100)[-2:]
    ('[0.25, 0.5, 0.75, … 4 numbers]', 'good 0.988', 'x…')
    """
    if isinstance(value, list) and len(value) > _NUMBERS_SHOWN and isinstance(value[0], float):
        shown = ", ".join(f"{number:.3g}" for number in value[:_NUMBERS_SHOWN])
        return f"[{shown}, … {len(value)} numbers]"
    if isinstance(value, dict) and "label" in value and "score" in value:
        return f"{value['label']} {value['score']:.3g}"
    return shorten(f"{value:.4g}" if isinstance(value, float) else str(value), _CELL_CHARACTERS)
