"""``lum rerun RUN``: do a recorded run again, and say whether the outputs are the same."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from luminosity.cli.common.child import run_child
from luminosity.cli.common.exits import DIFFERENT, FAILED, fail
from luminosity.cli.common.options import add_command, add_folder_option, chosen_folder, number
from luminosity.cli.common.output import json_text
from luminosity.cli.rerun.outcome import Outcome, compare_outputs, compare_reads
from luminosity.cli.rerun.redirect import Redirected, copy_inputs, redirect, with_secrets
from luminosity.errors import Fix, OptionError, RecordError
from luminosity.runs import records
from luminosity.runs.manifest import manifest as manifests
from luminosity.runs.manifest.files import is_local
from luminosity.runs.manifest.manifest import Difference, Manifest, differences_from_now
from luminosity.runs.manifest.places import Sealed

__all__ = ["add_to"]

_TOLERANCE = 1e-5  # models round differently with other batches; a changed model differs by more
_CLOCK_S = 2.0  # by which the times of files may be before the clock of the machine
_MOST_NAMED = 20  # packages and files in a report for people; --json has all

_DESCRIPTION = """\
Do a recorded run again, and say whether it writes the same. First it names what
has changed since: commit, code, packages, inputs, models, machine. Then it runs
the same command, which writes into a new folder. Nothing of the first run is
overwritten.

Exit codes: 0 the same, 3 different, 1 the run failed, 2 wrong usage.
"""
_EPILOG = """\
An output is the same if its bytes are, if it has the same rows in another order
or in other files, or if numbers differ by rounding alone (--tolerance).

examples:
  lum rerun last                      do the newest run again
  lum rerun 4f2a9c --check            only say what has changed since
  lum rerun 4f2a9c --into again       write into the folder again
  lum rerun 4f2a9c --tolerance 0      rounding counts as a difference
  lum rerun 4f2a9c --overwrite        for outputs that the command does not name:
                                      copy them aside, run the command as it was
  lum rerun 4f2a9c -- --api_key=KEY   give a secret, which was not recorded
"""


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = add_command(
        commands,
        "rerun",
        "do a run again, and compare its outputs",
        _DESCRIPTION,
        _EPILOG,
        usage="lum rerun RUN [options] [-- options of the run]",
    )
    parser.add_argument("run", metavar="RUN", help="the id of a run, its unique start or end, or last")
    parser.add_argument("--into", metavar="DIR", help="a new folder for the outputs (default: rerun-RUN)")
    parser.add_argument("--check", action="store_true", help="only say what has changed since; run nothing")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="run the command as it was, which may overwrite its outputs; they are copied first",
    )
    parser.add_argument(
        "--tolerance",
        type=number,
        default=_TOLERANCE,
        metavar="T",
        help="largest difference between two numbers that counts as rounding; of numbers above 1, a part of the "
        f"number (default: {_TOLERANCE:g})",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_folder_option(parser)
    parser.set_defaults(command=rerun)


def rerun(parsed: argparse.Namespace) -> int:
    """Do a run again and compare; return the exit code. ``parsed.more`` are further options of the run."""
    from importlib.metadata import version

    folder = chosen_folder(parsed)
    manifest = manifests.load(folder, records.find(folder, parsed.run).started.run, to_run=True)
    changes = differences_from_now(manifest, version("luminosity"))
    if parsed.check:
        _print_changes(manifest, changes, parsed.json)
        return DIFFERENT if changes else 0
    _check(manifest)
    words = with_secrets(manifest.command, parsed.more, manifest.run)
    into = _new_folder(parsed.into, manifest)
    since = manifest.started_at - _CLOCK_S
    outputs = [each.path for each in manifest.outputs]
    inputs = [each.path for each in (*manifest.inputs, *manifest.models)]
    plan = redirect(words, manifest.folder, outputs, inputs, into, since)
    if parsed.overwrite:
        plan = Redirected(tuple(words), {}, ())
    elif plan.unnamed:
        raise OptionError(
            f"the command of run {manifest.run} does not name its output {plan.unnamed[0]}, so that it would be "
            "overwritten",
            fix="add --overwrite: outputs are copied first, then the command runs as it was",
        )
    if not parsed.json:
        _print_changes(manifest, changes, False)
    try:
        os.makedirs(into, exist_ok=True)
        kept = _copy(manifest, into) if parsed.overwrite else {}
        copy_inputs(inputs, plan, outputs)
    except OSError as error:
        raise OptionError(f"--into={into}: {error.strerror or error}: {error.filename or into}") from error
    print(f"running in {manifest.folder}: {' '.join(_hidden(plan.words, parsed.more))}", file=sys.stderr)
    mark = secrets.token_hex(8)
    try:
        code = run_child(plan.words, manifest.folder, mark, run_dir=str(folder), is_quiet=parsed.json)
    except OSError as error:
        return fail("rerun", f"{words[0]} can't be started in {manifest.folder}: {error}", FAILED)
    if code:
        where = f"; copies of the outputs are in {into}" if kept else ""
        return fail("rerun", f"the command has failed with exit code {code}{where}", FAILED)
    again = _same_run(folder, manifest, mark)
    outcomes = _compare(manifest, again, kept, parsed.tolerance)
    _print(manifest, again, changes, outcomes, into, as_json=parsed.json)
    return 0 if all(each.is_same for each in outcomes) else DIFFERENT


def _check(manifest: Manifest) -> None:
    """Raise if the run can't be done again, or if there is nothing to compare."""
    if manifest.state == "running":
        raise RecordError(
            f"the manifest of run {manifest.run} is not complete: the run goes on, or its process was killed",
            fix="wait for its end, or run the pipeline again",
        )
    if manifest.state not in ("done", "drained"):
        raise RecordError(f"run {manifest.run} is {manifest.state}; only a run that is done has outputs to compare")
    if not manifest.command:
        raise RecordError(
            f"the command of run {manifest.run} is not known: it ran in a notebook, from `python -c`, or is too long",
            fix="run the pipeline from a script",
        )
    if not os.path.isdir(manifest.folder):
        raise RecordError(f"run {manifest.run} ran in {manifest.folder}, which is gone", fix="restore the folder")
    if not manifest.outputs:
        steps = f"; what these steps do is not known: {', '.join(manifest.unknown)}" if manifest.unknown else ""
        raise RecordError(
            f"run {manifest.run} has no output that its manifest knows, so that there is nothing to compare{steps}",
            fix="write with WriteTable, WriteQdrant, WriteLance or Beam's file sinks",
        )


def _new_folder(given: str | None, manifest: Manifest) -> str:
    if given is not None:
        if os.path.exists(given) and (not os.path.isdir(given) or os.listdir(given)):
            raise OptionError(f"--into={given}: expected a new or empty folder")
        return os.path.abspath(given)
    name, number = f"rerun-{manifest.run}", 1
    while os.path.exists(name):
        number += 1
        name = f"rerun-{manifest.run}-{number}"
    return os.path.abspath(name)


def _copy(manifest: Manifest, into: str) -> dict[str, str]:
    """Copy the outputs aside; return their new paths."""
    kept: dict[str, str] = {}
    for position, each in enumerate(manifest.outputs):
        if is_local(each.path) and os.path.exists(each.path):
            new = os.path.join(into, f"before-{position}", os.path.basename(each.path))
            os.makedirs(os.path.dirname(new), exist_ok=True)
            if os.path.isdir(each.path):
                shutil.copytree(each.path, new)
            else:
                shutil.copy2(each.path, new)
            kept[each.path] = new
    return kept


def _same_run(folder: Path, manifest: Manifest, mark: str) -> Manifest:
    """Return the manifest of the run that the command has done now in the place of the first one."""
    found = [each for each in manifests.started_by(folder, mark) if each.number == manifest.number]
    if not found:
        raise RecordError(
            f"the command has run, but no run of it is recorded in {folder}",
            fix=Fix("", command="pass --run_dir with the folder in which its runs are recorded"),
        )
    return found[0]


def _compare(manifest: Manifest, again: Manifest, kept: dict[str, str], tolerance: float) -> list[Outcome]:
    since = (manifest.started_at - _CLOCK_S, again.started_at - _CLOCK_S)
    now: dict[str, list[Sealed]] = {}
    for each in again.outputs:
        now.setdefault(each.step, []).append(each)
    outcomes: list[Outcome] = []
    for before in manifest.outputs:
        place = kept.get(before.path, before.path)
        found = now.get(before.step, [])
        outcomes.append(compare_outputs(before, place, found.pop(0) if found else None, since, tolerance))
    return outcomes


def _print_changes(manifest: Manifest, changes: list[Difference], as_json: bool) -> None:
    if as_json:
        print(json_text({"run": manifest.run, "changes": [asdict(each) for each in changes]}))
        return
    print(
        f"since run {manifest.run}: "
        + (f"{len(changes)} changes" if len(changes) > 1 else str(changes[0]) if changes else "nothing has changed")
    )
    for change in changes[:_MOST_NAMED] if len(changes) > 1 else ():
        print(f"  {change}")
    if len(changes) > _MOST_NAMED:
        print(f"  and {len(changes) - _MOST_NAMED} more; --json shows all")
    for each in (*manifest.inputs, *manifest.models):
        if each.is_sampled:
            print(f"  {each.path} is large: only parts of it were compared")
    if manifest.unknown:
        print(f"  not known: what {', '.join(map(repr, manifest.unknown))} read or write")


def _print(
    manifest: Manifest, again: Manifest, changes: list[Difference], outcomes: list[Outcome], into: str, *, as_json: bool
) -> None:
    taken = {
        "inputs": compare_reads(manifest.inputs, again.inputs),
        "models": compare_reads(manifest.models, again.models),
    }
    is_same = all(each.is_same for each in outcomes)
    if as_json:
        data = {
            "run": manifest.run,
            "rerun": again.run,
            "same": is_same,
            "changes": [asdict(each) for each in changes],
            "taken": taken,
            "outputs": [asdict(each) for each in outcomes],
            "unknown": manifest.unknown,
            "folder": into,
        }
        print(json_text(data))
        return
    for what, found in taken.items():
        for line in found:
            print(f"the rerun took other {what}: {line}")
    for each in outcomes:
        print(f"{each.step}: {each}")
    same = sum(each.is_same for each in outcomes)
    verdict = "the same" if is_same else "DIFFERENT"
    print(f"{verdict}: {same} of {len(outcomes)} outputs are equal; see `lum show {again.run}`")


def _hidden(words: tuple[str, ...], more: list[str]) -> list[str]:
    """Return the command as it may be shown: without the values of options that were given again."""
    return [word.partition("=")[0] if word in more else word for word in words]
