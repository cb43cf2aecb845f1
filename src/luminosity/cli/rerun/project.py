"""``lum run project.toml``: run the steps that are not up to date, in order, and keep what each was made from."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from luminosity._shared.shared_files import replace_file
from luminosity._shared.text import did_you_mean
from luminosity.cli.common.child import run_child
from luminosity.cli.common.exits import FAILED, WRONG_USE, fail
from luminosity.cli.common.project_file import Project, Step
from luminosity.errors import LuminosityError, OptionError
from luminosity.runs import records
from luminosity.runs.manifest import manifest as manifests
from luminosity.runs.manifest import surroundings
from luminosity.runs.manifest.files import files_of, is_local
from luminosity.runs.manifest.manifest import Manifest, compare_files, compare_packages, compare_places
from luminosity.runs.manifest.masking import mask_words
from luminosity.runs.manifest.places import Place, Sealed, seal
from luminosity.runs.views import words

__all__ = ["run_project"]

_FOLDER = ".luminosity"
_FORMAT = 1


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


@dataclass(frozen=True)
class StepState:
    """What a step was made from when it last succeeded, and what it has written."""

    words: tuple[str, ...]  # without secrets
    inputs: tuple[Sealed, ...]
    outputs: tuple[Sealed, ...]
    models: tuple[Sealed, ...]
    code: dict[str, str]
    packages: dict[str, str]

    @classmethod
    def of(
        cls, project: Project, step: Step, inputs: tuple[Sealed, ...], version: str, runs: list[Manifest]
    ) -> StepState:
        """Return the state after a success; ``runs`` are the manifests of the pipelines that the step has run."""
        code = {file: digest for run in runs for file, digest in run.code.items()}
        return cls(
            tuple(mask_words(step.words)),
            inputs,
            tuple(seal(Place(step.name, project.whole(path))) for path in step.outputs),
            tuple(model for run in runs for model in run.models),
            {**_scripts(project, step), **code},
            {**surroundings.packages(), "luminosity": version},
        )


def inputs_of(project: Project, step: Step) -> tuple[Sealed, ...]:
    """Return the declared inputs of a step with their digests now."""
    return tuple(seal(Place(step.name, project.whole(path))) for path in step.inputs)


def why_to_run(project: Project, step: Step, version: str) -> str:
    """Say in a few words why a step must run; return nothing if it is up to date."""
    state = load_state(project, step)
    if state is None:
        return "it has not run yet"
    if state.words != tuple(mask_words(step.words)):
        return "its command has changed"
    if [each.path for each in state.inputs] != [project.whole(path) for path in step.inputs]:
        return "its inputs are others"
    if not step.outputs:
        return "it has no outputs by which to tell whether it is up to date"
    outputs = tuple(seal(Place(step.name, project.whole(path))) for path in step.outputs)
    for before, now in zip(state.outputs, outputs, strict=False):
        if not now.digest:
            return f"its output {os.path.relpath(now.path, project.folder)} is missing"
        if now.digest != before.digest:
            return f"its output {os.path.relpath(now.path, project.folder)} has changed"
    if len(state.outputs) != len(outputs):
        return "its outputs are others"
    changes = [
        *compare_places("input", state.inputs),
        *compare_files("code", state.code),
        *compare_places("model", state.models),
        *compare_packages(state.packages, version),
    ]
    if not changes:
        return ""
    first = changes[0]
    name = os.path.relpath(first.name, project.folder) if os.path.isabs(first.name) else first.name
    more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
    return f"{first.what} {name} has changed{more}"


def load_state(project: Project, step: Step) -> StepState | None:
    """Return the state of a step's last success, or None if there is none that this version can read."""
    try:
        data: Any = json.loads(_state_file(project, step).read_text())
        if data.pop("format") != _FORMAT:
            return None
        for name in ("inputs", "outputs", "models"):
            data[name] = tuple(Sealed(**each) for each in data[name])
        data["words"] = tuple(data["words"])
        return StepState(**data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the step runs once more, and writes it anew


def save_state(project: Project, step: Step, state: StepState | None) -> None:
    """Write the state of a step in one move; None removes it, before the step runs again."""
    path = _state_file(project, step)
    try:
        if state is None:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"format": _FORMAT, **asdict(state)}, indent=1))
    except OSError as error:
        raise LuminosityError(f"{path} can't be written: {error}", fix="make the project's folder writable") from error


def _state_file(project: Project, step: Step) -> Path:
    return project.folder / _FOLDER / project.path.stem / f"{step.name}.json"


def _scripts(project: Project, step: Step) -> dict[str, str]:
    """Return the digests of the scripts that the command names."""
    scripts = [str(project.folder / word) for word in step.words[1:] if word.endswith((".py", ".yaml", ".yml"))]
    return {each: seal(Place(step.name, each)).digest for each in scripts if os.path.isfile(each)}
