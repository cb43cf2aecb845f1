"""``lum bench HANDLER --data FILE``: finds the settings that suit a model, on your own data."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from luminosity.cli.common.exits import FAILED, interrupted, was_terminated
from luminosity.cli.common.options import count
from luminosity.errors import OptionError
from luminosity.inference.model_names import HANDLER_HELP, handler_of

if TYPE_CHECKING:
    from luminosity.inference.tuning.tune import Tuning

__all__ = ["add_to", "bench"]

_ROWS = 2000
_SECONDS = 60.0
_PIPED_WIDTH = 120  # columns of the table if the output is not a terminal
_DESCRIPTION = """\
Find the device, dtype, threads and batch size with which a model is fastest
on this machine, on your own data. Each candidate runs in its own processes
and is warmed up before it is measured. If a candidate fails, the report says
why.
"""
_EXAMPLES = """\
examples:
  lum bench embed:models/encoder --data docs.parquet --column text
      all settings, for an embedding model
  lum bench classify:models/sentiment --data lines.txt --dtype float32,bfloat16
      only these two dtypes, for a classifier
  lum bench my_models:handler --data rows.jsonl --column pixels --json all.json
      a handler in my_models.py; all numbers also go to a file
"""


def add_to(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "bench",
        help="find the best settings for a model on your data",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("handler", metavar="HANDLER", help=HANDLER_HELP)
    parser.add_argument("--data", required=True, metavar="FILE", help="Parquet, JSON lines, CSV, TSV or lines of text")
    parser.add_argument("--column", metavar="C", help="the column with the examples (default: the only column)")
    parser.add_argument(
        "--rows", type=count, default=_ROWS, metavar="N", help=f"sample N rows of the file (default: {_ROWS:,})"
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=_SECONDS,
        metavar="S",
        help=f"time limit of the search (default: {_SECONDS:g})",
    )
    parser.add_argument(
        "--device", type=_names, default=(), metavar="D,...", help="try only these devices, such as cpu,cuda"
    )
    parser.add_argument(
        "--dtype", type=_names, default=(), metavar="D,...", help="try only these dtypes, such as bfloat16"
    )
    parser.add_argument(
        "--threads", type=_counts, default=(), metavar="N,...", help="try only these numbers of threads per worker"
    )
    parser.add_argument("--json", metavar="FILE", help="write all numbers to FILE; - prints them instead of the table")
    parser.set_defaults(command=bench)


def bench(parsed: argparse.Namespace) -> int:
    """Run the search, print the report and return the exit code."""
    handler = handler_of(parsed.handler)
    # Imported here, because Beam takes a second to import and --help must be fast.
    from luminosity.inference.tuning.sample_rows import read_rows
    from luminosity.inference.tuning.tune import Choices, Tuning

    examples = read_rows(parsed.data, parsed.column, parsed.rows)
    tuning = Tuning(handler, examples, parsed.seconds, Choices(parsed.device, parsed.dtype, parsed.threads))
    try:
        _run_with_progress(tuning)
    except KeyboardInterrupt:
        if not tuning.search.trials:
            raise
        status = interrupted("bench", "; these are the results so far")
        reported = _report(parsed, tuning, len(examples))
        return status if was_terminated() else reported
    return _report(parsed, tuning, len(examples))


def _report(parsed: argparse.Namespace, tuning: Tuning, rows: int) -> int:
    from luminosity.cli.bench.report import as_data, print_report

    data = json.dumps(as_data(tuning, parsed.handler, rows), indent=2)
    if parsed.json == "-":
        print(data)
    else:
        width = None if sys.stdout.isatty() else _PIPED_WIDTH
        print_report(Console(highlight=False, width=width), tuning, parsed.handler, rows)
        if parsed.json:
            _write(parsed.json, data)
    return 0 if tuning.search.best is not None else FAILED


def _run_with_progress(tuning: Tuning) -> None:
    console = Console(stderr=True)
    columns = (TimeElapsedColumn(), BarColumn(12), TextColumn("{task.description}"), TextColumn("{task.fields[best]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("importing libraries, preparing rows", total=None, best="")
        tuning.on_begin = lambda candidate: progress.update(task, description=str(candidate))
        for _ in tuning.run():
            search = tuning.search
            best = f"best {search.best.rate:,.0f} rows/s" if search.best is not None else ""
            progress.update(task, completed=len(search.trials), total=search.planned, best=best)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
    except OSError as error:
        raise OptionError(f"--json={path}: {error.strerror}") from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds")
    return seconds


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip().lower() for part in text.split(",")) if name)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(name) for name in _names(text))
