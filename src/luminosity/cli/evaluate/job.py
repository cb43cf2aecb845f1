"""The work of ``lum evaluate``: read the table, evaluate it, write the report, print the verdict.

The evaluation itself is ``luminosity.evaluation.evaluate``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from luminosity._shared.text import printable
from luminosity.cli.common.exits import NOT_MET, print_ignoring_closed_pipe
from luminosity.cli.common.output import ProgressLine, check_report, json_text, tell_who_reads
from luminosity.cli.common.table_options import TableReader, csv_arguments
from luminosity.errors import OptionError
from luminosity.evaluation.columns import roots_of
from luminosity.evaluation.evaluate_table import evaluate_batches
from luminosity.evaluation.result import Evaluation, Metric
from luminosity.evaluation.settings import Settings
from luminosity.io.read_table import ReadTable

__all__ = ["run"]

_MOST_SLICES = 50  # lines of values: the worst come first
_ERRORS = ("mae", "rmse", "mean_error")  # better if lower


def run(parsed: argparse.Namespace) -> int:
    """Run the command with its parsed options, and return its exit code."""
    began = time.monotonic()
    settings = _settings(parsed)
    check_report(parsed.report)
    reader = TableReader("evaluate", parsed.dead_letters)
    with ProgressLine() as progress, reader:
        (csv,) = csv_arguments(parsed, parsed.table)
        columns = roots_of(settings.columns, ReadTable(parsed.table, **csv).schema.names)
        done = progress.rows(f"reading {parsed.table}")
        found = evaluate_batches(_read(reader, reader.open(parsed.table, columns, csv), done), settings)
        failed = _failed(parsed, found)
        has_requirements = bool(parsed.at_least or parsed.at_most)
        if parsed.report:
            found.write_report(
                parsed.report,
                title=parsed.table,
                settings=_described(settings),
                failed=failed if has_requirements else None,
            )
    if parsed.report:
        tell_who_reads("evaluate", parsed.report, "values")
    seconds = time.monotonic() - began
    if parsed.json:
        verdict = {"passed": not failed, "failed": failed} if has_requirements else {}
        about = {
            "settings": _described(settings),
            "versions": {"luminosity": version("luminosity")},
            **reader.as_dict(),
        }
        print_ignoring_closed_pipe(json_text({**verdict, **found.as_dict(), **about, "seconds": round(seconds, 3)}))
    else:
        print_ignoring_closed_pipe("\n".join(_lines(parsed, found, failed, has_requirements, seconds)))
    return NOT_MET if failed else 0


def _settings(parsed: argparse.Namespace) -> Settings:
    if not parsed.table.strip():
        raise OptionError("TABLE is empty, expected a file, a folder or a pattern; perhaps a shell variable is not set")
    if parsed.prediction is None and parsed.score is None:
        raise OptionError("found neither --prediction nor --score, expected one of them", fix="add --prediction COLUMN")
    if parsed.each_slice and not (parsed.slice and (parsed.at_least or parsed.at_most)):
        raise OptionError("found --each-slice, expected --slice and --at-least or --at-most with it")
    names = ("label", "prediction", "score", "prediction_b", "score_b", "query", "task", "positive", "score_of")
    numbers = ("k", "bins", "resamples", "confidence", "seed", "skip_missing")
    slices = tuple(tuple(name for name in text.split(",") if name) for text in parsed.slice)
    return Settings(slices=slices, **{name: getattr(parsed, name) for name in (*names, *numbers)})


def _read(reader: TableReader, table: ReadTable, done: Any) -> Iterator[Any]:
    rows = 0
    for _, batch in reader.rows(table):
        yield batch
        rows += batch.num_rows
        done(rows)


def _described(settings: Settings) -> dict[str, Any]:
    found = {name: value for name, value in vars(settings).items() if value not in (None, (), False)}
    found["slices"] = [",".join(by) for by in settings.slices] or None
    for name in ("most_distinct", "most_slices", *(() if settings.query else ("k",))):
        found.pop(name, None)
    return {name.replace("_", " "): value for name, value in found.items() if value is not None}


def _failed(parsed: argparse.Namespace, found: Evaluation) -> list[str]:
    """Return a sentence for each requirement that is not met."""
    failed: list[str] = []
    parts: list[tuple[str, Evaluation]] = [("", found)]
    if parsed.each_slice:
        parts += [(f"{by}={_key(key)}: ", each) for by, values in found.slices.items() for key, each in values.items()]
    for name, limit, is_least in [
        *((*each, True) for each in parsed.at_least),
        *((*each, False) for each in parsed.at_most),
    ]:
        found.metric(name)  # names the metrics that there are, if it is not one of them
        for where, each in parts:
            metric = each.metrics.get(name, Metric(None, reason="no rows have it"))
            if metric.value is None:
                failed.append(f"{where}{name} is {metric}")
            elif (metric.value < limit) if is_least else (metric.value > limit):
                failed.append(f"{where}{name} {metric.value:.4g} is {'below' if is_least else 'above'} {limit:g}")
    return failed


def _lines(
    parsed: argparse.Namespace, found: Evaluation, failed: list[str], has_requirements: bool, seconds: float
) -> list[str]:
    """Return the verdict, the second model, and the slices."""
    unit = "queries" if found.task == "ranking" else "rows"
    skipped = f" · {found.skipped:,} rows with missing values skipped" if found.skipped else ""
    verdict = f"not met: {'; '.join(failed)} · " if failed else "met: " if has_requirements else ""
    positive = f" · positive class {found.positive!r}" if found.positive is not None else ""
    if positive and parsed.positive is None:
        positive += " (--positive chooses another)"
    lines = [f"{verdict}{found}{positive} · {found.rows:,} {unit}{skipped} · {seconds:.1f} s"]
    lines += [f"note: {each}" for each in found.notes]
    if found.differences:
        shown = [name for name in found.main_metrics if name in found.differences]
        lines.append("  second model minus first: " + ", ".join(f"{name} {found.differences[name]}" for name in shown))
    for by, values in found.slices.items():
        lines += _slice_lines(by, values, unit)
    return lines


def _slice_lines(by: str, values: Any, unit: str) -> list[str]:
    def order(item: tuple[Any, Evaluation]) -> tuple[bool, float]:
        name, metric = next(iter(item[1].metrics.items()))
        worst = metric.value if metric.value is not None else 0.0
        return metric.value is None, -worst if name in _ERRORS else worst

    ordered = sorted(values.items(), key=order)
    width = max(len(_key(key)) for key in values) if values else 0
    lines = [f"by {by}:"]
    lines += [f"  {_key(key):<{width}}  {each} · {each.rows:,} {unit}" for key, each in ordered[:_MOST_SLICES]]
    if len(ordered) > _MOST_SLICES:
        lines.append(f"  and {len(ordered) - _MOST_SLICES:,} more; --json and --report show more")
    return lines


def _key(key: Any) -> str:
    return ", ".join(map(_key, key)) if isinstance(key, tuple) else "null" if key is None else printable(str(key))
