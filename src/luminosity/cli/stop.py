"""``lum stop`` and ``lum drain``: end a run of another terminal."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luminosity.cli.common.exits import FAILED, fail
from luminosity.cli.common.options import add_command, add_folder_option, chosen_folder, number
from luminosity.errors import RecordError
from luminosity.runs import journal
from luminosity.runs.ending import ask_to_end
from luminosity.runs.journal import Action
from luminosity.runs.records import Record, find
from luminosity.runs.views import words

if TYPE_CHECKING:
    pass

__all__ = ["add_to", "end", "end_by_checkpoint"]
_LOOK_EVERY_S = 0.2  # how late the end of the run is noticed
_TELL_EVERY_S = 10.0  # as often as a run writes its record
_PATIENCE_S: dict[Action, float] = {"stop": 120.0, "drain": 3600.0}
_DOING: dict[Action, str] = {"stop": "stopping", "drain": "draining"}
_GOOD_ENDS: dict[Action, tuple[str, ...]] = {
    "stop": ("stopped", "cancelled", "done", "drained", "finished"),
    "drain": ("drained", "done", "finished"),
}
_RUN_HELP = "the id of a run, its unique start or end, or last; see `lum runs`; or the run's checkpoint folder"
_EXITS = """\
exit codes:
  0  the run has ended as you asked, or was done before that
  1  the run has failed, or has not ended in time
  2  there is no such run, or it does not run
"""
_STOP_EPILOG = f"""\
The run starts no more bundles, waits for those that run (up to --stop_timeout
of the run, 30 s unless it says otherwise), and saves a last checkpoint. Start
it again with the same --checkpoint_dir, and it continues there. A run without
--checkpoint_dir has nothing to continue from: it is cancelled.

SIGTERM and Ctrl-C stop a run in the same way.

{_EXITS}
examples:
  lum stop last                       stop the newest run
  lum stop 4f2a9c                     the start or end of an id is enough
  lum stop last --timeout=600         wait up to ten minutes for its end
  lum stop work/checkpoint            stop the run with this --checkpoint_dir
"""
_DRAIN_EPILOG = f"""\
The sources of the run read nothing new. What they have read goes through the
pipeline to its end: windows close, timers fire, and sinks write their last
files. The run needs --checkpoint_dir, and its folder says afterwards that the
run has finished. If you want to continue later, use `lum stop`.

{_EXITS}
examples:
  lum drain last                      drain the newest run
  lum drain 4f2a9c --timeout=60       wait up to a minute for its end
"""


def add_to(commands: Any) -> None:
    """Add the commands to the subparsers of ``lum``."""
    texts: dict[Action, tuple[str, str, str]] = {
        "stop": ("stop a run", "Stop a run that runs now. It keeps its checkpoint.", _STOP_EPILOG),
        "drain": ("let a stream finish", "Let a run finish what it has read, and read nothing new.", _DRAIN_EPILOG),
    }
    for action, (summary, description, epilog) in texts.items():
        parser = add_command(commands, action, summary, description, epilog)
        parser.add_argument("run", metavar="RUN", help=_RUN_HELP)
        parser.add_argument(
            "--timeout",
            type=_seconds,
            default=_PATIENCE_S[action],
            metavar="SECONDS",
            help=f"how long to wait for the end of the run (default: {_PATIENCE_S[action]:.0f})",
        )
        add_folder_option(parser)
        parser.set_defaults(command=_command(action))


def _command(action: Action) -> Any:
    def command(parsed: argparse.Namespace) -> int:
        if os.sep in parsed.run or (os.path.isdir(parsed.run) and parsed.run != "last"):
            return end_by_checkpoint(parsed.run, action, parsed.timeout)
        return end(chosen_folder(parsed), parsed.run, action, parsed.timeout)

    return command


def end(folder: Path, wanted: str, action: Action, timeout_s: float) -> int:
    """Ask a run to end, wait for that, and say how it ended. Returns the exit code.

    Raises :class:`RecordError` if there is no such run, or if it can't be ended in this way.
    """
    record = find(folder, wanted, only_last=True)
    run_id = record.started.run
    ask_to_end(folder, record, action)
    _tell(f"{_DOING[action]} run {run_id} ({record.started.title})")
    record = _wait_for_end(folder, run_id, action, timeout_s)
    if record.state == "running":
        message = f"run {run_id} is still {_DOING[action]} after {words.duration(timeout_s)}, and goes on with that"
        return fail(action, f"{message}; look at it with `lum show {run_id}`", FAILED)
    print(f"run {run_id}: {_how_it_ended(record)}")
    return 0 if record.state in _GOOD_ENDS[action] else FAILED


def end_by_checkpoint(folder: str, action: Action, timeout_s: float) -> int:
    """End the run that uses a checkpoint folder as :func:`end` does. The run needs no record.

    Raises :class:`CheckpointError` if there is no checkpoint in the folder, and :class:`RecordError` if no run uses it.
    """
    from luminosity.engine.durable.inspection import inspect  # these import Beam
    from luminosity.runs.run_ids import is_at_work

    found = inspect(folder)
    if not is_at_work(folder):
        raise RecordError(
            f"no run uses {folder}, expected one that runs; its last run is {found.state}",
            fix="list the runs with `lum runs`",
        )
    journal.send(Path(folder), journal.IN_CHECKPOINT, action)
    _tell(f"{_DOING[action]} the run in {folder} ({found.pipeline})")
    began = told = time.monotonic()
    while is_at_work(folder):
        now = time.monotonic()
        if now - began >= timeout_s:
            message = f"the run is still {_DOING[action]} after {words.duration(timeout_s)}, and goes on with that"
            return fail(action, f"{message}; look at it with `lum checkpoint {folder}`", FAILED)
        if now - told >= _TELL_EVERY_S:
            told = now
            _tell(f"{_DOING[action]} for {words.duration(now - began)}")
        time.sleep(min(_LOOK_EVERY_S, max(0.0, timeout_s - (now - began))))
    state = inspect(folder).state
    again = f"; start it again with --checkpoint_dir={folder} to continue" if state not in _GOOD_ENDS["drain"] else ""
    print(f"{folder}: {state}{again}")
    return 0 if state in _GOOD_ENDS[action] else FAILED


def _wait_for_end(folder: Path, run_id: str, action: Action, timeout_s: float) -> Record:
    """Wait until a run has ended, or until the time is up; return its record."""
    began = told = time.monotonic()
    while True:
        record = find(folder, run_id, only_last=True)
        now = time.monotonic()
        if record.state != "running" or now - began >= timeout_s:
            return record
        if now - told >= _TELL_EVERY_S:
            told = now
            waiting = sum(stage.queued for stage in record.last.stages) if record.last is not None else 0
            _tell(f"{_DOING[action]} for {words.duration(now - began)}, {words.number(waiting)} elements wait")
        time.sleep(min(_LOOK_EVERY_S, max(0.0, timeout_s - (now - began))))


def _how_it_ended(record: Record) -> str:
    folder = record.started.checkpoint_dir
    again = f"start it again with --checkpoint_dir={folder} to continue"
    if record.started.name.startswith("lum enrich"):
        again = "repeat the command with --resume to continue"
    if record.state == "stopped":
        return f"stopped; {again}"
    if record.state == "cancelled":
        return f"cancelled; {again if folder else 'it had no checkpoint'}"
    if record.state == "failed" and record.ended is not None:
        return f"failed: {record.ended.failure}"
    return "lost: its process ended without a word" if record.state == "lost" else record.state


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _seconds(text: str) -> float:
    seconds = number(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds from 0")
    return seconds
