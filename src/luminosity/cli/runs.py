"""``lum runs``: list the recorded runs."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from luminosity.cli.common.options import add_folder_option, chosen_folder, count
from luminosity.runs import records
from luminosity.runs.records import Damaged, Record
from luminosity.runs.views import words

__all__ = ["add_to", "runs"]

_LIMIT = 20  # runs; about a screen
_HEADS = ("run", "started", "pipeline", "state", "took")
_GAP = 2  # columns between fields
_LEAST_REASON = 12  # columns; a shorter piece of a reason says nothing
_STYLES = {"done": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "lost": "red"} | {
    "stopped": "yellow",
    "drained": "green",
}
_EPILOG = """\
Runs are recorded in ~/.luminosity/runs, or in the folder that --run_dir or
LUMINOSITY_RUN_DIR names. A run is done, failed, cancelled, running, or lost:
the process of a lost run was killed. A run with --checkpoint_dir may also be
stopped, so that its next start continues it, or drained.

A pipeline is named by --job_name, or else by its script. Pipelines with the
same name in different folders are listed with a part of their folders.

On a terminal you get a table. In a pipe you get one line for each run, with its
fields separated by tabs: those of the table, why it failed, and the folder of
the script.

examples:
  lum runs                      list the newest runs
  lum runs --limit=100          list more of them
  lum runs | grep failed        find the runs that failed
"""


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = commands.add_parser(
        "runs",
        help="list recorded runs",
        description="List recorded runs, newest first.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--limit", type=count, default=_LIMIT, metavar="N", help=f"at most N runs (default: {_LIMIT})")
    add_folder_option(parser)
    parser.set_defaults(command=lambda parsed: runs(chosen_folder(parsed), parsed.limit))


def runs(folder: Path, limit: int) -> int:
    """Print the newest runs in ``folder``; return the exit code."""
    ids = records.run_ids(folder)
    loaded = [records.load(records.path_of(folder, run_id), only_last=True) for run_id in ids[:limit]]
    found = [record for record in loaded if isinstance(record, Record)]
    if not ids:
        print(f"No run is recorded in {folder} yet.", file=sys.stderr)
    elif sys.stdout.isatty():
        console = Console(highlight=False)
        console.print(_table(found, console.width))
    else:
        for record in found:
            print("\t".join((*_fields(record, record.started.title).values(), record.started.folder)))
    if len(ids) > limit and sys.stdout.isatty():
        print(f"and {len(ids) - limit} older runs; --limit=N lists more", file=sys.stderr)
    for damaged in loaded:
        if isinstance(damaged, Damaged):
            print(f"lum runs: {damaged.path} is damaged: {damaged.reason}", file=sys.stderr)
    return 0


def _fields(record: Record, title: str) -> dict[str, str]:
    started = f"{datetime.fromtimestamp(record.started.started_at):%Y-%m-%d %H:%M}"
    took = words.duration(record.last.seconds) if record.last is not None else ""
    why = record.ended.failure if record.ended is not None and record.state == "failed" else ""
    fields = (record.started.run, started, title, record.state, took)
    return {**dict(zip(_HEADS, fields, strict=True)), "why": why}


def _table(found: list[Record], width: int) -> Table:
    titles = words.titles([record.started for record in found])
    rows = [_fields(record, title) for record, title in zip(found, titles, strict=True)]
    widths = {head: max(len(head), *(len(row[head]) for row in rows)) + _GAP for head in _HEADS}
    if width < sum(widths.values()):
        del widths["started"]  # the run's id contains it
    room = width - sum(widths.values())
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for head in widths:
        table.add_column(head, no_wrap=True, justify="right" if head == "took" else "left")
    table.add_column(no_wrap=True)
    for row in rows:
        reason = words.shortened(row["why"], room) if room >= _LEAST_REASON else ""
        cells = [Text(row[head], style=_STYLES[row[head]] if head == "state" else "") for head in widths]
        table.add_row(*cells, Text(reason, style="dim"))
    return table
