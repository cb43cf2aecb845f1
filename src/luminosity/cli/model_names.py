"""The names by which commands take a model."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

from luminosity.errors import OptionError

if TYPE_CHECKING:
    from apache_beam.ml.inference.base import ModelHandler

    from luminosity.inference.handler import Handler

__all__ = ["HANDLER_HELP", "handler_of", "named_handler"]

HANDLER_HELP = "module:object (a handler, or what makes one), embed:PATH or classify:PATH (a folder or a model's name)"

_KINDS = {"embed": "SentenceEmbedder", "classify": "TextClassifier"}


def handler_of(name: str) -> Handler[Any, Any, Any]:
    """The handler of this name, with all hooks."""
    from luminosity.inference.adapting.adapt import adapt

    return adapt(named_handler(name))


def named_handler(name: str) -> ModelHandler[Any, Any, Any]:
    """The handler of this name as it is, Beam's or ours; the current directory is importable.

    >>> named_handler("json:dumbs")
    Traceback (most recent call last):
    luminosity.errors.OptionError: json:dumbs: the module json has no 'dumbs'; did you mean dumps or dump?
    """
    kind, colon, rest = name.partition(":")
    if kind.endswith(".py"):
        raise OptionError(f"{name} names a file, expected a module: {kind[:-3].replace(os.sep, '.')}:{rest or 'NAME'}")
    if not (kind and colon and rest):
        raise OptionError(f"found {name!r}, expected {HANDLER_HELP}")
    if kind in _KINDS:
        import luminosity  # what stands behind these names imports Beam, which takes a second: not for --help

        return getattr(luminosity, _KINDS[kind])(rest)
    return _checked(name, _made(name, _found(name, kind, rest)))


def _found(name: str, module_name: str, path: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # The module is there, and something that it imports is not: its traceback tells more.
        alike = difflib.get_close_matches(module_name, _KINDS)
        hint = f"; did you mean {alike[0]}:{path}?" if alike else ""
        raise OptionError(
            f"{name}: there is no module {error.name!r}, neither installed nor in {os.getcwd()}{hint}"
        ) from None
    owner = f"the module {module_name}"
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            alike = difflib.get_close_matches(attribute, [each for each in dir(found) if each[0] != "_"])
            hint = f"; did you mean {' or '.join(alike)}?" if alike else ""
            raise OptionError(f"{name}: {owner} has no {attribute!r}{hint}")
        found, owner = getattr(found, attribute), attribute
    return found


def _made(name: str, found: Any) -> Any:
    """The object itself, or what it makes: a class, or a function without arguments."""
    from apache_beam.ml.inference.base import ModelHandler

    if not callable(found) or isinstance(found, ModelHandler):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise OptionError(f"{name}: {error}; name a handler, or a function without arguments that makes one") from None
    return found()


def _checked(name: str, handler: Any) -> ModelHandler[Any, Any, Any]:
    from luminosity.inference.adapting.adapt import adapt

    try:
        adapt(handler)
    except TypeError as error:
        raise OptionError(f"{name}: {error}") from None
    if list(handler.get_preprocess_fns()) or list(handler.get_postprocess_fns()):
        raise OptionError(
            f"{name} has functions before or after the model, which a pipeline runs: name the handler without them"
        )
    return handler
