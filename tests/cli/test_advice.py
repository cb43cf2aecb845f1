"""Tests of the advice in errors: the options that it names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import luminosity
from luminosity._shared.flags import MODEL_FLAGS, RUNNER_FLAGS
from luminosity.cli.common import exits
from luminosity.cli.main import main
from luminosity.errors import Fix, TableError

_SOURCES = Path(luminosity.__file__).parent
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z_-]*")
# Options of Beam, of its YAML files and of pip.
_OF_OTHERS = {
    "--extra_package",
    "--jinja_variable_flags",
    "--jinja_variables",
    "--no-deps",
    "--requirements_file",
    "--setup_file",
    "--streaming",
}


@pytest.fixture(scope="module")
def commands() -> dict[str, set[str]]:
    """The options of each command, as its parser has them."""
    with pytest.raises(SystemExit):
        main(["--version"])
    return {name: set(options) for name, options in exits._options.items()}  # pyright: ignore[reportPrivateUsage]


def text_of(node: ast.expr) -> str:
    """The text of a string, with 1 in place of what is computed."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(each) if isinstance(each, ast.Constant) else "1" for each in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return text_of(node.body) + " " + text_of(node.orelse)
    return ""


def advices() -> Iterator[tuple[str, str]]:
    """Every advice in the sources that a command may print, with its place."""
    for path in sorted(_SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            for keyword in node.keywords:
                if keyword.arg == "fix" or (keyword.arg == "command" and name == "Fix"):
                    yield f"{path.relative_to(_SOURCES)}:{node.lineno}", text_of(keyword.value)


def test_every_option_in_an_advice_exists(commands: dict[str, set[str]]) -> None:
    every = {option for options in commands.values() for option in options} | _OF_OTHERS
    every |= {f"--{flag.name}" for flag in (*RUNNER_FLAGS, *MODEL_FLAGS)} | {"--debug", "--help"}
    found = list(advices())
    assert sum("--" in text for _, text in found) > 20
    assert [(place, text) for place, text in found if set(_OPTION.findall(text)) - every] == []
    # An advice that names a command names its options: checked whatever command is in use.
    assert [(place, text) for place, text in found if "lum " in text and exits.unknown_options(text, "run")] == []


def test_a_command_does_not_advise_what_it_does_not_have(
    commands: dict[str, set[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"--columns", "--if-exists", "--cpu_workers"} <= commands["enrich"]
    assert "--columns" not in commands["drift"]
    error = TableError("can't be read", fix=Fix("pass columns=", command="read other columns with --columns"))
    told = {}
    for command in ("enrich", "drift"):
        assert exits.fail(command, error, 1) == 1
        told[command] = capsys.readouterr().err
    assert told == {
        "enrich": "lum enrich: can't be read; read other columns with --columns\n",
        "drift": "lum drift: can't be read\n",
    }


def test_an_option_of_another_command_may_be_advised(commands: dict[str, set[str]]) -> None:
    assert commands["enrich"]
    assert not exits.unknown_options("lum enrich --dead-letters PATH collects the lines", "drift")
    assert exits.unknown_options("lum enrich --dead-leters PATH", "drift") == ["--dead-leters"]
