"""The types of answers by name, for commands and YAML files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from luminosity._shared.text import did_you_mean, shorten_repr
from luminosity.errors import InvalidArgument

__all__ = ["TYPE_HELP", "type_named"]

_WORDS = {"text": str, "int": int, "float": float, "bool": bool}
TYPE_HELP = "choices such as good|bad, a word (text, int, float or bool), or the path of a JSON schema (schema.json)"


def type_named(name: Any) -> Any:
    """Return the type that a name, a list of choices or a JSON schema stands for, as ``Prompt`` takes it.

    >>> type_named("good|bad"), type_named(["good", "bad"]), type_named("int")
    (typing.Literal['good', 'bad'], typing.Literal['good', 'bad'], <class 'int'>)
    """
    if isinstance(name, Mapping):
        return cast("dict[str, Any]", dict(name))
    if isinstance(name, Sequence) and not isinstance(name, str):
        return _choices(list(cast("Sequence[Any]", name)), shorten_repr(name, 80))
    if not isinstance(name, str):
        raise InvalidArgument(f"found the type {name!r}, expected {TYPE_HELP}")
    if name in _WORDS:
        return _WORDS[name]
    if name.endswith(".json"):
        return _schema(name)
    if "|" in name:
        return _choices([each.strip() for each in name.split("|")], repr(name))
    raise InvalidArgument(f"found the type {name!r}, expected {TYPE_HELP}", fix=did_you_mean(name, _WORDS) or None)


def _choices(found: list[Any], shown: str) -> Any:
    if not found or not all(isinstance(each, str) and each for each in found):
        raise InvalidArgument(f"found the choices {shown}, expected texts, none of them empty")
    if twice := [each for each in dict.fromkeys(found) if found.count(each) > 1]:
        raise InvalidArgument(f"found the choice {twice[0]!r} several times in {shown}, expected each once")
    return Literal[tuple(found)]


def _schema(path: str) -> dict[str, Any]:
    path = os.path.expanduser(path)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        raise InvalidArgument(f"found no file {path!r} with a JSON schema") from None
    except ValueError as error:
        raise InvalidArgument(f"the file {path!r} is no JSON schema: {error}") from None
    except OSError as error:
        raise InvalidArgument(f"can't read {path!r}, expected a file with a JSON schema: {error.strerror}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"the file {path!r} holds {type(found).__name__}, expected a JSON schema: an object")
    return cast("dict[str, Any]", found)
