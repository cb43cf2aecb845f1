"""What is known of a step's last success, and whether the step is up to date."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from luminosity.cli.project.project_file import Project, Step
from luminosity.errors import LuminosityError
from luminosity.runs.manifest import surroundings
from luminosity.runs.manifest.differences import compare_files, compare_packages, compare_places
from luminosity.runs.manifest.manifest import Manifest
from luminosity.runs.manifest.masking import mask_words
from luminosity.runs.manifest.places import Place, Sealed, seal

__all__ = ["StepState", "inputs_of", "load_state", "save_state", "why_to_run"]

_FOLDER = ".luminosity"
_FORMAT = 1


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
        data: Any = json.loads(_path(project, step).read_text())
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
    path = _path(project, step)
    try:
        if state is None:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"format": _FORMAT, **asdict(state)}, indent=1))
        os.replace(unfinished, path)
    except OSError as error:
        raise LuminosityError(f"{path} can't be written: {error}", fix="make the project's folder writable") from error


def _path(project: Project, step: Step) -> Path:
    return project.folder / _FOLDER / project.path.stem / f"{step.name}.json"


def _scripts(project: Project, step: Step) -> dict[str, str]:
    """Return the digests of the scripts that the command names."""
    scripts = [str(project.folder / word) for word in step.words[1:] if word.endswith((".py", ".yaml", ".yml"))]
    return {each: seal(Place(step.name, each)).digest for each in scripts if os.path.isfile(each)}
