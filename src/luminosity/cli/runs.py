"""``lum runs``: the runs on record."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from luminosity.engine.monitor import records
from luminosity.engine.monitor.records import Damaged, Record, load, path_of, run_ids
from luminosity.engine.monitor.views import words
from luminosity.errors import RecordError

_LIMIT = 20
_HEADS = ("run", "started", "script", "state", "took")
_GAP = 2
_LEAST_REASON = 12
_STYLES = {"done": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "lost": "red"}
_EXAMPLES = """\
A run is recorded in ~/.luminosity/runs, or where --run_dir or
LUMINOSITY_RUN_DIR say. A lost run's process was killed.

examples:
  lum runs                      the newest runs
  lum runs --limit=100          more of them
  lum runs | grep failed        one line a run, its fields parted by tabs
"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "runs",
        help="list recorded runs",
        description="List recorded runs, the newest first.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--limit", type=_count, default=_LIMIT, metavar="N", help=f"at most N runs (default: {_LIMIT})")
    add_folder_option(parser)
    parser.set_defaults(command=lambda parsed: runs(chosen_folder(parsed), parsed.limit))


def runs(folder: Path, limit: int) -> int:
    ids = run_ids(folder)
    loaded = [load(path_of(folder, run_id)) for run_id in ids[:limit]]
    records = [record for record in loaded if isinstance(record, Record)]
    if not ids:
        print(f"No run is recorded in {folder} yet.", file=sys.stderr)
    elif sys.stdout.isatty():
        console = Console(highlight=False)
        console.print(_table(records, console.width))
    else:
        for record in records:
            print("\t".join(_fields(record).values()))
    if len(ids) > limit and sys.stdout.isatty():
        print(f"and {len(ids) - limit} older; --limit shows more", file=sys.stderr)
    for damaged in loaded:
        if isinstance(damaged, Damaged):
            print(f"lum runs: {damaged.path} is damaged: {damaged.reason}", file=sys.stderr)
    return 0


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1")
    return int(text)


def _fields(record: Record) -> dict[str, str]:
    started = f"{datetime.fromtimestamp(record.started.started_at):%Y-%m-%d %H:%M}"
    took = words.duration(record.last.seconds) if record.last is not None else ""
    why = record.ended.failure if record.ended is not None and record.state == "failed" else ""
    fields = (record.started.run, started, record.started.name, record.state, took)
    return {**dict(zip(_HEADS, fields, strict=True)), "why": why}


def _table(records: list[Record], width: int) -> Table:
    rows = [_fields(record) for record in records]
    widths = {head: max(len(head), *(len(row[head]) for row in rows)) + _GAP for head in _HEADS}
    if width < sum(widths.values()):
        del widths["started"]  # the id says as much
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


def add_folder_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run_dir",
        metavar="DIR",
        help="where the runs are (default: the environment's LUMINOSITY_RUN_DIR, else ~/.luminosity/runs)",
    )


def chosen_folder(parsed: argparse.Namespace) -> Path:
    found = records.folder(parsed.run_dir)
    if found is None:
        raise RecordError(
            "runs are not recorded (--run_dir or LUMINOSITY_RUN_DIR is off); --run_dir=DIR names a folder"
        )
    return found
