"""The work of ``lum run project.toml``: run the steps that are not up to date, in order."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from luminosity._shared.text import did_you_mean
from luminosity.cli.common.child import run_child
from luminosity.cli.common.exits import FAILED, WRONG_USE, fail
from luminosity.cli.project.project_file import Project, Step
from luminosity.cli.project.step_state import StepState, inputs_of, save_state, why_to_run
from luminosity.errors import LuminosityError, OptionError
from luminosity.runs import records
from luminosity.runs.manifest import manifest as manifests
from luminosity.runs.manifest.digests import files_of, is_local
from luminosity.runs.manifest.manifest import Manifest
from luminosity.runs.views import words

__all__ = ["run_project"]


def run_project(path: str, options: list[str]) -> int:
    """Run a project file with the options that follow its name; return the exit code."""
    try:
        parsed = _parse(options)
        project = Project.read(path)
        first = _first(project, parsed.start)
    except LuminosityError as error:
        return fail("run", error, WRONG_USE)
    own = version("luminosity")
    made: set[str] = set()  # outputs that a step of this call makes anew
    for number, step in enumerate(project.steps):
        head = f"step {step.name}"
        if number < first:
            print(f"{head}: left out by --from", flush=True)
            continue
        follows = next(
            (each for each in step.inputs if any(_touch(project.whole(each), output) for output in made)), ""
        )
        reason = "--force" if parsed.force else why_to_run(project, step, own)
        if parsed.dry_run and not reason and follows:
            reason = f"its input {follows} will be made anew"
        if not reason:
            print(f"{head}: up to date", flush=True)
            continue
        print(f"{head}: {'would run' if parsed.dry_run else 'runs'}, {reason}", flush=True)
        made.update(map(project.whole, step.outputs))
        if not parsed.dry_run:
            try:
                code = _run(project, step, own)
            except LuminosityError as error:
                return fail("run", f"step {step.name!r} ({path}:{step.line}): {error}", FAILED)
            if code:
                return fail(
                    "run",
                    f"step {step.name!r} ({path}:{step.line}) has failed with exit code {code}; no later step ran",
                    FAILED,
                )
    return 0


def _run(project: Project, step: Step, own: str) -> int:
    """Run one step; return its exit code, which is that of a failure if an output is missing."""
    inputs = inputs_of(project, step)
    for each in inputs:
        if not each.digest:
            raise OptionError(f"its input {each.path}: {each.note}", fix="run the steps before it first")
    save_state(project, step, None)  # if the step fails, it is not up to date
    for output in step.outputs:
        os.makedirs(os.path.dirname(project.whole(output)), exist_ok=True)
    mark = secrets.token_hex(8)
    began = time.monotonic()
    try:
        code = run_child(step.words, str(project.folder), mark)
    except OSError as error:
        raise OptionError(
            f"{step.words[0]} can't be started: {error}", fix="install it, or use lum or python"
        ) from error
    if code:
        return code
    missing = [output for output in step.outputs if not files_of(project.whole(output))]
    if missing:
        raise OptionError(f"it has not written its output {missing[0]}", fix="correct outputs in the project file")
    runs = _runs(mark)
    _tell_undeclared(project, step, runs)
    save_state(project, step, StepState.of(project, step, inputs, own, runs))
    print(f"step {step.name}: done in {words.duration(time.monotonic() - began)}", flush=True)
    return 0


def _runs(mark: str) -> list[Manifest]:
    """Return the manifests of the runs of a step; none if runs are not recorded."""
    folder = records.folder(None)
    return manifests.started_by(folder, mark) if folder is not None else []


def _tell_undeclared(project: Project, step: Step, runs: list[Manifest]) -> None:
    """Warn of files that a step has read or written and that the project file does not name."""
    for what, declared in (("inputs", step.inputs), ("outputs", step.outputs)):
        known = [project.whole(path) for path in declared]
        for each in sorted({place.path for run in runs for place in getattr(run, what)}):
            if is_local(each) and not _is_declared(each, known):
                print(
                    f"lum run: step {step.name!r} has {'read' if what == 'inputs' else 'written'} {each}, which {what} "
                    f"in {project.path.name}:{step.line} does not name",
                    file=sys.stderr,
                )


def _is_declared(path: str, known: Sequence[str]) -> bool:
    """Return whether a path, or every file that a pattern or a folder means, is named in the project file."""
    if any(_touch(path, each) for each in known):
        return True
    declared = {os.path.realpath(file) for each in known for file in files_of(each)}
    files = files_of(path)
    return bool(files) and all(os.path.realpath(file) in declared for file in files)


def _touch(first: str, second: str) -> bool:
    """Return whether one path is the other, or in it; links count as what they lead to."""
    first, second = os.path.realpath(first), os.path.realpath(second)
    return first == second or first.startswith(second + os.sep) or second.startswith(first + os.sep)


def _parse(options: list[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--from", dest="start")
    return parser.parse_args(options)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; a project file takes --force, --from STEP and --dry-run")


def _first(project: Project, name: str | None) -> int:
    if name is None:
        return 0
    names = [step.name for step in project.steps]
    if name not in names:
        fix = did_you_mean(name, names) or f"name one of {', '.join(names)}"
        raise OptionError(f"--from {name}: there is no such step in {project.path.name}", fix=fix)
    return names.index(name)
