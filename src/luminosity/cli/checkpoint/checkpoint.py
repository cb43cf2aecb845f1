"""``lum checkpoint DIR``: show what a run has saved, compare it with its checksums, or go back to an earlier state."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from luminosity._shared.text import format_bytes
from luminosity.cli.common.exits import FAILED
from luminosity.cli.common.options import add_command
from luminosity.cli.common.output import output_console
from luminosity.runs.views import words

if TYPE_CHECKING:
    from rich.table import Table

    from luminosity.engine.durable.inspection import Inspection, StoredStep

__all__ = ["add_to", "check", "checkpoint", "restore"]

_SAYS = {
    "running": "running",
    "killed": "its process ended without a word; the next start continues",
    "stopped": "stopped; the next start continues",
    "failed": "failed; the next start tries again from here",
    "drained": "drained: the next start has nothing to do; a new run goes on behind it with --continue_from",
    "finished": "finished: the next start has nothing to do, unless it has --restart",
    "empty": "nothing was saved yet",
}
_EPILOG = """\
You get the state of the run, the age of the last checkpoint, how often the run
was started, and for each step what waits for it, its state, timers and groups,
and its watermark. Works while a run uses the folder, and changes nothing.

With --check, everything in the folder is read and compared with its checksums.
With --restore last, the newest of the earlier states in the folder that is not
damaged takes the place of the checkpoint: what came after it is repeated.

exit codes:
  0  the folder has a checkpoint
  1  --check: it is damaged
  2  it has none, or one that a newer release has written; --restore: no earlier
     state that is not damaged, or a run uses the folder

examples:
  lum checkpoint work/checkpoint                  show it
  lum checkpoint work/checkpoint --json           print it as JSON
  lum checkpoint work/checkpoint --check          compare it with its checksums
  lum checkpoint work/checkpoint --restore last   go back to the last good state
"""


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = add_command(
        commands,
        "checkpoint",
        "show what is in a checkpoint folder",
        "Show what is in the folder that --checkpoint_dir of a run names.",
        _EPILOG,
    )
    parser.add_argument("folder", metavar="DIR", help="the checkpoint folder")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--check", action="store_true", help="compare everything in the folder with its checksums")
    chosen.add_argument("--restore", choices=["last"], help="go back to the last good state that was kept")
    parser.set_defaults(command=_checkpoint)


def _checkpoint(parsed: argparse.Namespace) -> int:
    if parsed.restore:
        return restore(parsed.folder)
    return check(parsed.folder) if parsed.check else checkpoint(parsed.folder, parsed.json)


def restore(folder: str) -> int:
    """Go back to the newest kept state that is not damaged, and say which it is; return the exit code.

    Raises :class:`CheckpointError` if there is none, or if a run uses the folder.
    """
    from luminosity.engine.durable.upkeep.kept_states import restore_last  # it imports Beam

    found = restore_last(folder)
    for line in found.passed_over:
        print(f"passed over: {line}", file=sys.stderr)
    when = f"{datetime.fromtimestamp(found.kept_at):%Y-%m-%d %H:%M:%S}"
    print(f"{folder}: went back to the state of {when}; the next start continues there, and repeats what came after it")
    return 0


def check(folder: str) -> int:
    """Compare everything in a checkpoint folder with its checksums, and print what is damaged; return the exit code.

    Raises :class:`CheckpointError` if there is no checkpoint in it.
    """
    from luminosity.engine.durable.upkeep.checking import check as find_damage  # it imports Beam

    found = find_damage(folder)
    for line in found.damage:
        print(line)
    if found.damage:
        return FAILED
    print(
        f"{folder}: {words.number(found.rows)} rows, the data of {words.number(found.blocks)} blocks and "
        f"{words.number(found.files)} files ({format_bytes(found.file_bytes)}), and {words.number(found.kept)} earlier "
        "states are what was written"
    )
    return 0


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
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    facts = {"checkpoint": found.folder, "pipeline": found.pipeline, "state": _SAYS.get(found.state, found.state)}
    if found.saved_at is not None:
        when = f"{datetime.fromtimestamp(found.saved_at):%Y-%m-%d %H:%M:%S}"
        facts["saved"] = f"{when}, {words.duration(found.age_seconds or 0.0)} ago"
    if found.kept:
        times = ", ".join(f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}" for at in found.kept)
        facts["kept"] = f"the states of {times}"
    facts["starts"] = str(found.generation)
    if found.holder is not None:
        facts["in use by"] = f"process {found.holder['pid']} on {found.holder['host']}"
    facts["size"] = f"{format_bytes(found.folder_bytes)} on the disk, {format_bytes(found.live_bytes)} of live data"
    if found.copy is not None:
        facts["copy"] = f"{found.copy.address}: {_copied(found)}"
    for name, text in facts.items():
        if text:
            table.add_row(name, Text(text))
    return table


def _copied(found: Inspection) -> str:
    """Return how far the copy is behind the checkpoint, and why if that is known."""
    assert found.copy is not None
    if found.saved_at is None or found.copy.saved_at is None:
        said = "nothing is copied yet"
    elif (lag := found.saved_at - found.copy.saved_at) <= 0:
        said = "complete"
    else:
        said = f"{words.duration(lag)} behind the checkpoint"
    return f"{said}; {found.copy.error}" if found.copy.error else said


def _steps(steps: list[StoredStep]) -> Table:
    from rich.table import Table
    from rich.text import Text

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
