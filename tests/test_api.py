"""Public names: each is there, has a docstring, and is on a page of the API reference."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias
from typing import Any

import pytest

import luminosity
from luminosity import errors

_DOCS = Path(__file__).parent.parent / "docs"

# Every public module, with the page of the reference that lists its names.
MODULES = {
    "luminosity": "api.md",
    "luminosity.answering": "api-answering.md",
    "luminosity.drift": "api-drift.md",
    "luminosity.errors": "errors.md",
    "luminosity.evaluation": "api-evaluation.md",
    "luminosity.events": "api-events.md",
    "luminosity.judging": "api-judging.md",
    "luminosity.testing": "api-testing.md",
}
# A docstring that begins with these says neither what the thing is nor what it does.
_RIDDLES = ("Of ", "For ", "That ", "Which ", "Since ")


def public_names(module: str) -> list[str]:
    return list(importlib.import_module(module).__all__)


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield every public class and function, and their public methods, except for overrides of Beam's."""
    for module in MODULES:
        for name in public_names(module):
            thing = getattr(importlib.import_module(module), name)
            if isinstance(thing, GenericAlias):
                continue  # Python 3.10 calls it a class
            if inspect.isclass(thing) or inspect.isroutine(thing):
                yield f"{module}.{name}", thing
            if inspect.isclass(thing):
                foreign = {member for base in thing.__mro__ for member in vars(base) if not _is_ours(base)}
                for member, value in vars(thing).items():
                    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
                    documented = inspect.isfunction(function) or isinstance(value, property)
                    if documented and not member.startswith("_") and member not in foreign:
                        yield f"{module}.{name}.{member}", getattr(thing, member)


def _is_ours(thing: type) -> bool:
    return thing.__module__.partition(".")[0] == "luminosity"


def test_every_public_name_is_there() -> None:
    for name in luminosity.__all__:
        assert getattr(luminosity, name).__module__.startswith("luminosity.")


@pytest.mark.parametrize("module", MODULES)
def test_all_names_are_there_once(module: str) -> None:
    names = public_names(module)
    assert len(names) == len(set(names))
    assert set(names) <= set(dir(importlib.import_module(module)))


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_lists_exactly_the_public_names(module: str) -> None:
    """A name that two modules share may be on either page."""
    listed = {
        page: set(re.findall(r"^::: ([\w.]+)$", (_DOCS / page).read_text(), re.MULTILINE)) for page in MODULES.values()
    }
    everywhere = {_resolve(name) for names in listed.values() for name in names}
    public = {f"{module}.{name}" for name in public_names(module)}
    assert listed[MODULES[module]] <= public, "the reference lists names that are not public"
    missing = [name for name in public if _resolve(name) not in everywhere]
    assert not missing, f"{MODULES[module]} does not list {missing}"


def _resolve(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_public_name_has_a_docstring() -> None:
    without = [name for name, thing in public_objects() if not inspect.getdoc(thing)]
    assert not without, f"found no docstring: {without}"


def test_docstrings_name_the_thing() -> None:
    riddles = [name for name, thing in public_objects() if (inspect.getdoc(thing) or "").startswith(_RIDDLES)]
    assert not riddles, f"found docstrings that begin with one of {_RIDDLES}: {riddles}"


def test_the_drawn_tree_holds_every_error() -> None:
    drawn = errors.__doc__ or ""
    for name in set(errors.__all__) - {"Fix", "may_pass"}:
        assert issubclass(getattr(errors, name), errors.LuminosityError)
        assert f" {name} " in f"{drawn} ".replace("\n", " "), f"{name} is missing in the tree"
