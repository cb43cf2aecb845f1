"""``lum checkpoint DIR``: show what is in a checkpoint folder."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from luminosity._shared.text import format_bytes
from luminosity.cli.common.output import output_console
from luminosity.runs.views import words

if TYPE_CHECKING:
    from luminosity.engine.durable.inspection import Inspection, StoredStep

__all__ = ["add_to", "checkpoint"]

_SAYS = {
    "running": "running",
    "killed": "its process ended without a word; the next start continues",
    "stopped": "stopped; the next start continues",
    "failed": "failed; the next start tries again from here",
    "drained": "drained: the next start has nothing to do, unless it has --restart",
    "finished": "finished: the next start has nothing to do, unless it has --restart",
    "empty": "nothing was saved yet",
}
_EPILOG = """\
You get the state of the run, the age of the last checkpoint, how often the run
was started, and for each step what waits for it, its state, timers and groups,
and its watermark. Works while a run uses the folder, and changes nothing.

exit codes:
  0  the folder has a checkpoint
  2  it has none, or one that a newer release has written

examples:
  lum checkpoint work/checkpoint          show it
  lum checkpoint work/checkpoint --json   print it as JSON
"""


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = commands.add_parser(
        "checkpoint",
        help="show what is in a checkpoint folder",
        description="Show what is in the folder that --checkpoint_dir of a run names.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", help="the checkpoint folder")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(command=lambda parsed: checkpoint(parsed.folder, parsed.json))


def checkpoint(folder: str, as_json: bool = False) -> int:
    """Print what is in a checkpoint folder; return the exit code.

    Raises :class:`CheckpointError` if there is no checkpoint in it.
    """
    from luminosity.engine.durable.inspection import inspect  # it imports Beam

    found = inspect(folder)
    if as_json:
        print(json.dumps({**asdict(found), "age_seconds": found.age_seconds}, indent=2))
        return 0
    console = output_console()
    console.print(_facts(found))
    if found.steps:
        console.print()
        console.print(_steps(found.steps))
    return 0


def _facts(found: Inspection) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    facts = {"checkpoint": found.folder, "pipeline": found.pipeline, "state": _SAYS.get(found.state, found.state)}
    if found.saved_at is not None:
        when = f"{datetime.fromtimestamp(found.saved_at):%Y-%m-%d %H:%M:%S}"
        facts["saved"] = f"{when}, {words.duration(found.age_seconds or 0.0)} ago"
    facts["starts"] = str(found.generation)
    if found.holder is not None:
        facts["in use by"] = f"process {found.holder['pid']} on {found.holder['host']}"
    facts["size"] = f"{format_bytes(found.folder_bytes)} on the disk, {format_bytes(found.live_bytes)} of live data"
    for name, text in facts.items():
        if text:
            table.add_row(name, Text(text))
    return table


def _steps(steps: list[StoredStep]) -> Table:
    columns = {
        "waiting": [f"{words.number(s.queued)} ({format_bytes(s.queued_bytes)})" if s.queued else "" for s in steps],
        "keys": ["" if s.keys is None else words.number(s.keys) for s in steps],
        "state": [format_bytes(s.state_bytes) if s.cells else "" for s in steps],
        "timers": [words.number(s.timers) if s.timers else "" for s in steps],
        "groups": [format_bytes(s.group_bytes) if s.group_rows else "" for s in steps],
        "watermark": [
            f"{datetime.fromtimestamp(s.watermark):%Y-%m-%d %H:%M:%S}" if s.watermark is not None else "" for s in steps
        ],
    }
    table = Table(box=None, pad_edge=False)
    table.add_column("step", overflow="fold")
    used = {name: cells for name, cells in columns.items() if any(cells)}
    for name in used:
        table.add_column(name, no_wrap=True, justify="right")
    for index, step in enumerate(steps):
        table.add_row(Text(step.name), *(cells[index] for cells in used.values()))
    return table
