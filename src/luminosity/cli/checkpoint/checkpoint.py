"""``lum checkpoint``: show what a run has saved, compare it with its checksums, go back, and keep savepoints."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from luminosity._shared.text import format_bytes
from luminosity.cli.checkpoint import savepoints
from luminosity.cli.common.exits import FAILED
from luminosity.cli.common.options import add_command
from luminosity.cli.common.output import output_console
from luminosity.errors import OptionError
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
    "savepoint": "a savepoint: a run begins with it in a new --checkpoint_dir, with --savepoint",
}
_EPILOG = """\
You get the state of the run, the age of the last checkpoint, how often the run
was started, and for each step what waits for it, its state, timers and groups,
and its watermark. Works while a run uses the folder, and changes nothing.

With --check, everything in the folder is read and compared with its checksums.
With --restore last, the newest of the earlier states in the folder that is not
damaged takes the place of the checkpoint: what came after it is repeated. With
--restore NAME, a savepoint does; all earlier states came after it, and go.

A savepoint is a copy that you name and that stays until you remove it. `save`
takes one while the run goes on, or of a run that has stopped; files of blocks
are links. NAME may be a path, for a savepoint on another disk. A run begins
with one in a new folder: --checkpoint_dir=NEW --savepoint=DIR/savepoints/NAME.

exit codes:
  0  done; the folder has a checkpoint
  1  --check: it is damaged; save: the disk is full
  2  it has none, or one that a newer release has written; there is no such
     savepoint, or one with this name already; --restore: what to go back to is
     damaged, or a run uses the folder

examples:
  lum checkpoint work/checkpoint                  show it
  lum checkpoint work/checkpoint --json           print it as JSON
  lum checkpoint work/checkpoint --check          compare it with its checksums
  lum checkpoint work/checkpoint --restore last   go back to the last good state
  lum checkpoint save work/checkpoint before-v2   save a savepoint
  lum checkpoint list work/checkpoint             list all, with sizes and ages
  lum checkpoint show work/checkpoint before-v2   show what is in one
  lum checkpoint remove work/checkpoint before-v2
"""
_USAGE = """lum checkpoint DIR [--json | --check | --restore last|NAME]
       lum checkpoint save DIR NAME [--json]
       lum checkpoint list DIR [--json]
       lum checkpoint show DIR NAME [--json]
       lum checkpoint remove DIR NAME"""
_WITH_NAME = ("save", "show", "remove")
_VERBS = (*_WITH_NAME, "list")


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = add_command(
        commands,
        "checkpoint",
        "show what is in a checkpoint folder, and keep savepoints",
        "Show what is in the folder that --checkpoint_dir of a run names, or keep\nsavepoints of it.",
        _EPILOG,
        _USAGE,
    )
    parser.add_argument(
        "words",
        metavar="DIR",
        nargs="+",
        help="the checkpoint folder; before it: save, list, show or remove, for savepoints (a folder with such a name "
        "is ./save); behind it: the name of the savepoint",
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--json", action="store_true", help="print everything as JSON")
    chosen.add_argument("--check", action="store_true", help="compare everything in the folder with its checksums")
    chosen.add_argument("--restore", metavar="last|NAME", help="go back to the last good state, or to a savepoint")
    parser.set_defaults(command=_checkpoint)


def _checkpoint(parsed: argparse.Namespace) -> int:
    verb, given = "", list(parsed.words)
    if given[0] in _VERBS:
        verb = given.pop(0)
        if parsed.check or parsed.restore:
            raise OptionError(
                f"found --{'check' if parsed.check else 'restore'} with {verb}, expected it with DIR alone",
                fix="see `lum checkpoint --help`",
            )
        if parsed.json and verb == "remove":
            raise OptionError("found --json with remove, expected it with what prints something", fix="leave it out")
    if len(given) != (2 if verb in _WITH_NAME else 1):
        wanted = f"`lum checkpoint {verb} DIR{' NAME' if verb in _WITH_NAME else ''}`" if verb else "one DIR"
        found = " ".join(parsed.words)
        raise OptionError(f"found `lum checkpoint {found}`, expected {wanted}", fix="see `lum checkpoint --help`")
    match verb:
        case "save":
            return savepoints.save(*given, as_json=parsed.json)
        case "list":
            return savepoints.list_all(*given, as_json=parsed.json)
        case "show":
            return savepoints.show(*given, as_json=parsed.json, print_checkpoint=checkpoint)
        case "remove":
            return savepoints.remove(*given)
        case _ if parsed.restore:
            return restore(given[0], parsed.restore)
        case _:
            return check(given[0]) if parsed.check else checkpoint(given[0], parsed.json)


def restore(folder: str, name: str = "last") -> int:
    """Go back to a savepoint, or to the newest kept state that is not damaged, and say so; return the exit code.

    Raises :class:`CheckpointError` if there is none, or if a run uses the folder.
    """
    from luminosity.engine.durable.upkeep.kept_states import restore_last  # these import Beam
    from luminosity.engine.durable.upkeep.savepoints import restore_savepoint

    if name != "last":
        savepoint = restore_savepoint(folder, name)
        when = f"{datetime.fromtimestamp(savepoint.saved_at):%Y-%m-%d %H:%M:%S}"
        print(
            f"{folder}: went back to the savepoint {savepoint.name} of {when}; the next start continues there, and "
            "repeats what came after it"
        )
        return 0
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
        f"{words.number(found.files)} files ({format_bytes(found.file_bytes)}), {words.number(found.kept)} earlier "
        f"states and {words.number(found.savepoints)} savepoints are what was written"
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
    if found.savepoints:
        facts["savepoints"] = f"{found.savepoints}: `lum checkpoint list {found.folder}` names them"
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
