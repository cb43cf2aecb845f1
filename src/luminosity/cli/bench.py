"""``lum bench HANDLER --data FILE``: finds the settings that suit a model, on your own data."""

from __future__ import annotations

import argparse
import glob
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from luminosity._shared.flags import HANDLER_HELP
from luminosity._shared.text import format_bytes
from luminosity.cli.common.exits import FAILED, interrupted, was_terminated
from luminosity.cli.common.options import add_command, count, number
from luminosity.cli.common.output import output_console
from luminosity.cli.common.sample_rows import read_rows
from luminosity.cli.common.table_options import TableReader, add_table_options, csv_arguments
from luminosity.core import usable_cores
from luminosity.errors import OptionError

if TYPE_CHECKING:  # rich takes a while to import: not for --help
    from rich.console import Console
    from rich.table import Table

    from luminosity.inference.tuning.search import Candidate, Trial
    from luminosity.inference.tuning.tune import Tuning

__all__ = ["add_to", "as_data", "bench", "print_report"]

_ROWS = 2000
_SECONDS = 60.0
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
_CLASSES = {"embed": "SentenceEmbedder", "classify": "TextClassifier"}


def add_to(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = add_command(commands, "bench", "find the best settings for a model on your data", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("handler", metavar="HANDLER", help=HANDLER_HELP)
    parser.add_argument("--data", required=True, metavar="FILE", help="Parquet, JSON lines, CSV, TSV or lines of text")
    parser.add_argument("--column", metavar="C", help="the column with the examples (default: the only column)")
    add_table_options(parser)
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
    # Imported here, because Beam takes a second to import and --help must be fast.
    from luminosity.inference.model_names import handler_of
    from luminosity.inference.tuning.tune import Choices, Tuning

    handler = handler_of(parsed.handler)
    csv = csv_arguments(parsed, glob.escape(parsed.data))[0]
    if parsed.dead_letters and not parsed.data.lower().endswith((".csv", ".tsv")):
        raise OptionError("--dead-letters is for lines of CSV that can't be read, but the file is no CSV")
    with TableReader("bench", parsed.dead_letters) as reader:
        examples = read_rows(parsed.data, parsed.column, parsed.rows, csv, reader)
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
    data = json.dumps(as_data(tuning, parsed.handler, rows), indent=2)
    if parsed.json == "-":
        print(data)
    else:
        print_report(output_console(), tuning, parsed.handler, rows)
        if parsed.json:
            _write(parsed.json, data)
    return 0 if tuning.search.best is not None else FAILED


def _run_with_progress(tuning: Tuning) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

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
    seconds = number(text)
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds")
    return seconds


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip().lower() for part in text.split(",")) if name)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(name) for name in _names(text))


def print_report(console: Console, tuning: Tuning, name: str, rows: int) -> None:
    """Print the report."""
    from rich.text import Text

    trials, best = sorted(tuning.search.trials, key=lambda trial: -trial.rate), tuning.search.best
    console.print(Text(f"{name} on {rows:,} rows, {usable_cores()} cores", style="bold"))
    console.print()
    if any(trial.measured for trial in trials):
        console.print(_table([trial for trial in trials if trial.measured], best))
    for trial in trials:
        if not trial.measured:
            console.print(Text(f"✗ {trial.candidate}: {trial.reason}", style="red"))
    console.print()
    for sentence in _notes(tuning):
        console.print(Text(sentence))
    if best is not None:
        console.print()
        console.print(
            Text(settings(name, tuning.handler_name, best, _ways(tuning)), style="bold green"), soft_wrap=True
        )


def settings(name: str, handler_name: str, best: Trial, ways: Sequence[str] = ()) -> str:
    """Return the text to paste: the handler, and the pipeline's flags if they differ from the defaults."""
    from luminosity.inference.tuning.tune import flags, handler_code

    kind, _, path = name.partition(":")
    own = _CLASSES.get(kind)
    first = repr(path) if own else "..."
    lines = [handler_code(own or handler_name, first, best.candidate)]
    if best.candidate.way == "padded" and "packed" in ways:
        lines = [f"handler = {lines[0]}", "handler.packs_rows = False"]
    return "\n".join([*lines, *([" ".join(flags(best.candidate))] if flags(best.candidate) else [])])


def _ways(tuning: Tuning) -> tuple[str, ...]:
    return tuning.survey.ways if tuning.survey is not None else ()


def as_data(tuning: Tuning, name: str, rows: int) -> dict[str, Any]:
    """Return all numbers, for other programs."""
    best, survey = tuning.search.best, tuning.survey
    return {
        "handler": name,
        "rows": rows,
        "cores": usable_cores(),
        "prepared_rows_per_second": survey.prepared_per_second if survey is not None else None,
        "is_out_of_time": tuning.is_out_of_time,
        "best": asdict(best.candidate) if best is not None else None,
        "settings": settings(name, tuning.handler_name, best, _ways(tuning)).splitlines() if best is not None else [],
        "trials": [_trial_data(trial) for trial in tuning.search.trials],
    }


def _trial_data(trial: Trial) -> dict[str, Any]:
    measured = None if trial.measured is None else {**asdict(trial.measured), "padding": trial.measured.padding}
    differs = asdict(trial.differs) if trial.differs is not None else None
    if differs is not None and math.isinf(differs["largest"]):
        differs["largest"] = None  # JSON has no infinity
    return {"candidate": asdict(trial.candidate), "measured": measured, "differs": differs, "reason": trial.reason}


def _table(trials: list[Trial], best: Trial | None) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    rows = [_cells(trial, _has_ways(trials), _has_vectors(trials)) for trial in trials]
    for head in dict.fromkeys(head for row in rows for head in row):
        is_text = head in ("device", "dtype", "way")
        table.add_column(head, no_wrap=True, justify="left" if is_text else "right")
    for trial, row in zip(trials, rows, strict=True):
        table.add_row("▸" if trial is best else "", *row.values(), style="bold" if trial is best else "")
    return table


def _has_ways(trials: list[Trial]) -> bool:
    """Return whether a GPU ran a model of texts in different ways: this decides on the columns."""
    return any(trial.candidate.way is not None for trial in trials)


def _has_vectors(trials: list[Trial]) -> bool:
    return any(trial.differs is not None and trial.differs.least_cosine is not None for trial in trials)


def _cells(trial: Trial, has_ways: bool, has_vectors: bool) -> dict[str, str]:
    """Return the cells of a trial with a measurement, by column."""
    candidate, measured = trial.candidate, trial.measured
    if measured is None:
        return {}
    rate, limit = measured.rows_per_second, candidate.max_batch_size
    workers = {"workers": str(candidate.workers), "threads": str(candidate.threads or "-")}
    start = {"start": f"{measured.first_seconds:.1f} s"} if has_ways else {}
    return {
        "device": candidate.device or "-",
        "dtype": candidate.dtype or "-",
        **({"way": candidate.way or _cores(candidate)} if has_ways else workers),
        "rows/s": f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}",
        "pad" if has_ways else "padding": f"{measured.padding:.0%}",
        "budget": f"{measured.budget:,.0f}",
        "batch": f"{measured.largest_batch:,}" if limit is None else f"≤{limit:,}",
        "memory": format_bytes(measured.memory_bytes),
        **start,
        **({"cosine": _cosine(trial)} if has_ways and has_vectors else {"differs": _differs(trial)}),
    }


def _cores(candidate: Candidate) -> str:
    """Return the workers and their threads, where a GPU's ways leave one column for them."""
    return "-" if candidate.threads is None else f"{candidate.workers} x {candidate.threads}"


def _cosine(trial: Trial) -> str:
    if trial.differs is None or trial.differs.least_cosine is None:
        return "-"
    return f"{trial.differs.least_cosine:.5f}"


def _differs(trial: Trial) -> str:
    if trial.differs is None:
        return "-"
    changed = f" +{trial.differs.changed}" if trial.differs.changed else ""
    return f"{trial.differs.largest:.1g}{changed}"


def _notes(tuning: Tuning) -> list[str]:
    from luminosity.inference.tuning.tune import sentences

    notes: list[str] = []
    search, best = tuning.search, tuning.search.best
    if best is None:
        return ["No candidate could be measured."]
    compared = [trial.differs for trial in search.trials if trial.differs is not None]
    if _has_ways(search.trials):
        if any(trial.candidate.threads is not None for trial in search.trials):
            notes.append("way, on the CPU: workers x threads of each")
        ran = dict.fromkeys(trial.measured.computed_by for trial in search.trials if trial.measured is not None)
        notes.append("start: from the load to the first predictions; imports are done before")
        notes.append(f"The models ran {'; '.join(filter(None, ran))}.")
    if compared and _has_ways(search.trials) and _has_vectors(search.trials):
        notes.append(f"cosine: the least cosine of a row's vector with that of {tuning.reference}")
    elif compared:
        more = "; +N: in N rows a label or text differs" if any(differs.changed for differs in compared) else ""
        notes.append(f"differs: the largest difference from the predictions of {tuning.reference}{more}")
    if any(trial.rate > best.rate for trial in search.trials):
        notes.append("A gain of less than 3% may be chance: the simpler settings are kept.")
    if tuning.survey is not None:
        notes += sentences(best, search.trials, tuning.survey)
    notes += tuning.not_varied
    if tuning.is_out_of_time:
        notes.append("The time was over before everything was tried: use a larger --seconds.")
    return notes
