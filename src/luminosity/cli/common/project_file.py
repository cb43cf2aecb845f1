"""A project file: steps in order, read from TOML and checked before anything runs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from luminosity._shared.text import did_you_mean
from luminosity._shared.toml_tables import TomlTable, read_toml
from luminosity.errors import PipelineFileError
from luminosity.runs.manifest.files import files_of

__all__ = ["Project", "Step"]

_PLACES = ("inputs", "outputs")
_KEYS = ("run", "command", "options", *_PLACES)
_NAME = re.compile(r"[\w][\w.-]*")


@dataclass(frozen=True)
class Step:
    """One step: a command with what it reads and writes. Paths are relative to the project's folder."""

    name: str
    words: tuple[str, ...]  # begins with lum, python or a program
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Project:
    """The steps of a project file."""

    path: Path
    steps: tuple[Step, ...]

    @property
    def folder(self) -> Path:
        """The folder of the file, in which all commands run."""
        return self.path.parent

    def whole(self, path: str) -> str:
        """Return an input or output of a step as an absolute path, without ``..``."""
        return os.path.normpath(self.folder / path)

    @classmethod
    def read(cls, path: str) -> Project:
        """Read and check a project file.

        Raises :class:`PipelineFileError` with file and line for anything that is wrong, also for an input that does not
        exist and that no earlier step makes.
        """
        table = read_toml(path, lambda message, fix: PipelineFileError(message, fix=fix))
        tables = table.tables("step")
        unknown = table.unknown()
        if unknown is not None:
            raise table.error(unknown, f"unknown table or key {unknown!r}", did_you_mean(unknown, ["step"]))
        if not tables:
            raise table.error("step", "found no step, expected [[step]] tables")
        file = Path(path).resolve()
        project = cls(file, tuple(_step(each, file.parent) for each in tables))
        _check_order(path, project)
        return project


def _step(table: TomlTable, folder: Path) -> Step:
    name = table.value("name")
    for key in _KEYS:
        table.value(key)
    table.finish("a step")
    words = _words(table)
    inputs, outputs = (tuple(_place(table, key, path, folder) for path in _paths(table, key)) for key in _PLACES)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise table.error("name", f"found name={name!r}, expected a name of letters, digits, '_', '-' and '.'")
    return Step(name, words, inputs, outputs, table.line)


def _words(table: TomlTable) -> tuple[str, ...]:
    script, words, options = table.value("run"), table.value("command"), table.value("options")
    if (script is None) == (words is None):
        raise table.error("run", "found both or none of run and command, expected one of them in a step")
    if script is None:
        if options is not None:
            fix = "write the options into command"
            raise table.error("options", "found options beside command, expected them with run", fix)
        words = shlex.split(words) if isinstance(words, str) else words
        if not _are_texts(words) or not words:
            raise table.error("command", "command: expected a text, or a list of texts")
        return tuple(words)
    if not isinstance(script, str) or not script.endswith((".py", ".yaml", ".yml")):
        raise table.error("run", f"found run={script!r}, expected a script or a pipeline in YAML")
    if isinstance(options, dict):
        options = [f"--{name}={value}" for name, value in cast("dict[str, Any]", options).items()]
    if not _are_texts(options or []):
        raise table.error("options", "options: expected a list of texts, or a table")
    return ("lum", "run", script, *(options or []))


def _paths(table: TomlTable, key: str) -> Sequence[str]:
    paths = table.value(key)
    if not _are_texts([] if paths is None else paths):
        raise table.error(key, f"{key}: found {paths!r}, expected a list of paths")
    return paths or []


def _place(table: TomlTable, key: str, path: str, folder: Path) -> str:
    """Return a path in one spelling, whichever the file has: relative to the project's folder if it is inside."""
    scheme, separator, rest = path.partition("://")
    if separator and scheme != "file":
        raise table.error(
            key,
            f"{key}: found {path}, expected a path of this machine",
            f"leave it out of {key}: a step with no other {key} runs each time",
        )
    given = os.path.expanduser(rest if separator else path)
    whole = os.path.normpath(os.path.join(folder, given))
    is_inside = whole == str(folder) or whole.startswith(f"{folder}{os.sep}")
    return os.path.relpath(whole, folder) if is_inside or not os.path.isabs(given) else whole


def _check_order(path: str, project: Project) -> None:
    """Raise if names or outputs repeat, or if a step reads what neither exists nor is made before."""
    names: dict[str, Step] = {}
    makers: dict[str, Step] = {}
    for step in project.steps:
        if step.name in names:
            raise PipelineFileError(
                f"{path}:{step.line}: there is a step {step.name!r} in line {names[step.name].line} already",
                fix="give each step a name of its own",
            )
        names[step.name] = step
        for output in step.outputs:
            if (
                other := _maker(output, makers) or next((makers[o] for o in makers if _covers(output, o)), None)
            ) is not None:
                raise PipelineFileError(
                    f"{path}:{step.line}: step {step.name!r} writes {output}, which step {other.name!r} in line "
                    f"{other.line} writes, too",
                    fix="let each step write a path of its own",
                )
        makers |= dict.fromkeys(step.outputs, step)
    made: dict[str, Step] = {}
    for step in project.steps:
        for each in step.inputs:
            if _maker(each, made) is None:
                _check_input(path, project, step, each, makers)
        made |= dict.fromkeys(step.outputs, step)


def _check_input(path: str, project: Project, step: Step, wanted: str, makers: dict[str, Step]) -> None:
    maker = _maker(wanted, makers)
    if maker is step:
        raise PipelineFileError(
            f"{path}:{step.line}: step {step.name!r} reads its own output {wanted}, and would never be up to date",
            fix="write to another path",
        )
    if maker is not None:
        raise PipelineFileError(
            f"{path}:{step.line}: step {step.name!r} reads {wanted}, which step {maker.name!r} in line {maker.line} "
            "makes later",
            fix=f"move step {maker.name!r} before step {step.name!r}; if each needs the other, they are a circle",
        )
    if not files_of(project.whole(wanted)):
        nearest = did_you_mean(wanted, makers)
        raise PipelineFileError(
            f"{path}:{step.line}: step {step.name!r} reads {wanted}, which does not exist, and no step makes it",
            fix=nearest or f"add the file to {project.folder}, or name it in the outputs of an earlier step",
        )


def _maker(path: str, makers: dict[str, Step]) -> Step | None:
    """Return the step that makes a path, or a folder around it."""
    return next((step for output, step in makers.items() if _covers(output, path)), None)


def _covers(output: str, path: str) -> bool:
    return path == output or path.startswith(output.rstrip(os.sep) + os.sep)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(each, str) and each for each in cast("Sequence[Any]", value)
    )
