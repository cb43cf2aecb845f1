"""A project file: steps in order, read from TOML and checked before anything runs."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from luminosity._shared.text import did_you_mean
from luminosity.errors import PipelineFileError
from luminosity.runs.manifest.files import files_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

__all__ = ["Project", "Step"]

_KEYS = ("name", "run", "command", "options", "inputs", "outputs")
_NAME = re.compile(r"[\w][\w.-]*")
_HEADER = re.compile(r"\s*\[\[\s*step\s*\]\]")


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
        file = Path(path).resolve()
        try:
            text = file.read_text(encoding="utf-8")
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PipelineFileError(f"{path}: {error}, expected TOML") from None
        except (OSError, UnicodeDecodeError) as error:
            raise PipelineFileError(f"{path} can't be read: {error}") from None
        project = cls(file, _Reader(path, text, file.parent).steps(content))
        _check_order(path, project)
        return project


class _Reader:
    """Turns the content of a file into steps; knows the lines for messages."""

    def __init__(self, path: str, text: str, folder: Path) -> None:
        self._path = path
        self._folder = folder
        self._lines = text.splitlines()
        self._headers = [number for number, line in enumerate(self._lines, 1) if _HEADER.match(line)]

    def steps(self, content: dict[str, Any]) -> tuple[Step, ...]:
        for name in content:
            if name != "step":
                raise self._error(
                    f"unknown table or key {name!r}", self._line_of(name, 0), did_you_mean(name, ["step"])
                )
        tables = content.get("step")
        if not isinstance(tables, list) or not tables:
            raise self._error("found no step, expected [[step]] tables", 1)
        return tuple(self._step(cast("dict[str, Any]", table), n) for n, table in enumerate(cast("list[Any]", tables)))

    def _step(self, table: dict[str, Any], number: int) -> Step:
        line = self._headers[number] if number < len(self._headers) else 1
        if not isinstance(table, dict):  # pyright: ignore[reportUnnecessaryIsInstance]  # it comes from a file
            raise self._error(f"found step={table!r}, expected [[step]] tables", line)
        for key in table:
            if key not in _KEYS:
                fix = did_you_mean(key, _KEYS) or f"use {', '.join(_KEYS)}"
                raise self._error(f"unknown key {key!r} in a step", self._line_of(key, line), fix)
        name = table.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise self._error(f"found name={name!r}, expected a name of letters, digits, '_', '-' and '.'", line)
        return Step(
            name,
            self._words(table, line),
            self._paths(table, "inputs", line),
            self._paths(table, "outputs", line),
            line,
        )

    def _words(self, table: dict[str, Any], line: int) -> tuple[str, ...]:
        if ("run" in table) == ("command" in table):
            raise self._error("found both or none of run and command, expected one of them in a step", line)
        if "run" not in table:
            if "options" in table:
                fix = "write the options into command"
                raise self._error(
                    "found options beside command, expected them with run", self._line_of("options", line), fix
                )
            words = table["command"]
            words = shlex.split(words) if isinstance(words, str) else words
            if not _are_texts(words) or not words:
                raise self._error("command: expected a text, or a list of texts", self._line_of("command", line))
            return tuple(words)
        script = table["run"]
        if not isinstance(script, str) or not script.endswith((".py", ".yaml", ".yml")):
            raise self._error(
                f"found run={script!r}, expected a script or a pipeline in YAML", self._line_of("run", line)
            )
        options = table.get("options", [])
        if isinstance(options, dict):
            options = [f"--{name}={value}" for name, value in cast("dict[str, Any]", options).items()]
        if not _are_texts(options):
            raise self._error("options: expected a list of texts, or a table", self._line_of("options", line))
        return ("lum", "run", script, *options)

    def _paths(self, table: dict[str, Any], key: str, line: int) -> tuple[str, ...]:
        paths = table.get(key, [])
        if not _are_texts(paths):
            raise self._error(f"{key}: found {paths!r}, expected a list of paths", self._line_of(key, line))
        return tuple(self._place(path, key, line) for path in paths)

    def _place(self, path: str, key: str, line: int) -> str:
        """Return a path in one spelling, whichever the file has: relative to the project's folder if it is inside."""
        scheme, separator, rest = path.partition("://")
        if separator and scheme != "file":
            raise self._error(
                f"{key}: found {path}, expected a path of this machine",
                self._line_of(key, line),
                f"leave it out of {key}: a step with no other {key} runs each time",
            )
        given = os.path.expanduser(rest if separator else path)
        whole = os.path.normpath(os.path.join(self._folder, given))
        is_inside = whole == str(self._folder) or whole.startswith(f"{self._folder}{os.sep}")
        return os.path.relpath(whole, self._folder) if is_inside or not os.path.isabs(given) else whole

    def _line_of(self, key: str, start: int) -> int:
        """Return the line of a key in the step whose header is in line ``start``."""
        pattern = re.compile(rf"\s*\[*\s*[\"']?{re.escape(key)}[\"']?\s*[=\].]")
        for number, line in enumerate(self._lines[start:], start + 1):
            if pattern.match(line):
                return number
            if start and _HEADER.match(line):
                break
        return max(1, start)

    def _error(self, message: str, line: int, fix: str = "") -> PipelineFileError:
        return PipelineFileError(f"{self._path}:{line}: {message}", fix=fix or None)


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
