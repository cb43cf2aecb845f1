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

from luminosity.cli import recorded
from luminosity.engine.records import Damaged, Record, load, path_of, run_ids
from luminosity.engine.views import words

_LIMIT = 20
_STYLES = {"done": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "lost": "red"}
_EXAMPLES = """\
A run is recorded in ~/.luminosity/runs, or where --run_dir or LUMINOSITY_RUN_DIR say. A lost run's process was killed.

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
    recorded.add_folder(parser)
    parser.set_defaults(command=lambda parsed: runs(recorded.folder(parsed), parsed.limit))


def runs(folder: Path, limit: int) -> int:
    ids = run_ids(folder)
    loaded = [load(path_of(folder, run_id)) for run_id in ids[:limit]]
    records = [record for record in loaded if isinstance(record, Record)]
    if not ids:
        print(f"No run is recorded in {folder} yet.", file=sys.stderr)
    elif sys.stdout.isatty():
        Console(highlight=False).print(_table(records))
    else:
        for record in records:
            print("\t".join(_fields(record)))
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


def _fields(record: Record) -> tuple[str, ...]:
    """Id, start, script, state, duration, and why it failed."""
    started = f"{datetime.fromtimestamp(record.started.started_at):%Y-%m-%d %H:%M:%S}"
    took = words.duration(record.last.seconds) if record.last is not None else ""
    why = record.ended.failure if record.ended is not None and record.state == "failed" else ""
    return record.started.run, started, record.started.name, record.state, took, why


def _table(records: list[Record]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("run", "started", "script", "state", "took"):
        table.add_column(name, no_wrap=True, justify="right" if name == "took" else "left")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for record in records:
        run_id, started, name, state, took, why = _fields(record)
        table.add_row(run_id, started, Text(name), Text(state, style=_STYLES[state]), took, Text(why, style="dim"))
    return table
