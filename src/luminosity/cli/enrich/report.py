"""The report that ``lum enrich`` prints at the end."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from apache_beam.metrics.metric import MetricResults
from rich.console import Console
from rich.table import Table
from rich.text import Text

from luminosity import ReadTable
from luminosity._shared.text import shorten
from luminosity.cli.common.exits import print_ignoring_closed_pipe
from luminosity.core import InferenceMetrics

if TYPE_CHECKING:
    from luminosity.cli.enrich.job import Job

__all__ = ["print_report"]

_MICROSECONDS = 1e6
_CELL_CHARACTERS = 60  # wider columns would leave no room for others
_NUMBERS_SHOWN = 3  # of a vector: enough to see that it is one


def print_report(job: Job, metrics: MetricResults, seconds: float) -> int:
    """Print how many rows each model processed and where they were written; with ``--show``, also some rows.

    Returns the number of rows that were written to ``OUT``.
    """
    console = Console(highlight=False)
    models, written, unreadable = _counts(metrics)
    shown = [_rows(job)] if job.show is not None and written["Write"] else []
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name in (each.name for each in job.requests):
        grid.add_row(Text(name), Text(_model(models[name])))
    # Without rows, no file is written.
    grid.add_row("written", Text(f"{_many(written['Write'])} to {job.out}" if written["Write"] else "nothing"))
    if job.dead_letters is not None:
        failed = written["DeadLetters"]
        lines = f" ({unreadable:,} {'line' if unreadable == 1 else 'lines'} unreadable)" if unreadable else ""
        grid.add_row("failed", Text(f"{_many(failed)}, in {job.dead_letters}{lines}" if failed else "none"))
    if job.writing_store is not None:
        store = job.writing_store.address
        collection = f"collection {store.collection} of " if store.collection else ""
        grid.add_row("stored", Text(f"in {collection}{store.where}"))
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


def _rows(job: Job) -> Table:
    batches = ReadTable(job.out).first(job.show or 0)
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
