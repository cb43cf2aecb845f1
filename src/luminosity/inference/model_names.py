"""The names by which commands and YAML files take a model: ``embed:MODEL``, ``chat:URL#MODEL``, ``module:object``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luminosity._shared.flags import HANDLER_HELP
from luminosity._shared.text import did_you_mean
from luminosity.errors import InvalidType, OptionError

if TYPE_CHECKING:
    from apache_beam.ml.inference.base import ModelHandler

    from luminosity.inference.handler import Handler

__all__ = ["generator_named", "handler_of", "named_handler"]

_KINDS = (
    *("embed", "classify", "summarize", "generate", "chat", "embed-images", "classify-images"),
    *("xgboost", "lightgbm"),
)
_NEW_TOKENS = 300  # of an answer to a prompt, unless a pipeline says it


def handler_of(name: str) -> Handler[Any, Any, Any]:
    """Return the handler of this name, with all hooks. Raises ``ModelUnavailable`` if its model can't be found."""
    from luminosity.inference.adapting.adapt import adapt
    from luminosity.inference.steps.pinning import pin_here

    handler = adapt(pin_here(named_handler(name)).handler)
    handler.check_files()
    return handler


def named_handler(name: str) -> ModelHandler[Any, Any, Any]:
    """Return the handler of this name unchanged, Beam's or ours. Modules in the current directory can be imported.

    >>> named_handler("json:dumbs")
    Traceback (most recent call last):
    luminosity.errors.OptionError: json:dumbs: the module json has no 'dumbs'; did you mean 'dumps' or 'dump'?
    """
    kind, colon, rest = name.partition(":")
    if kind.endswith(".py"):
        module = f"{kind[:-3].replace(os.sep, '.')}:{rest or 'NAME'}"
        raise OptionError(f"{name} names a file, expected a module", fix=f"use {module}")
    if not (kind and colon and rest):
        raise OptionError(f"found {name!r}, expected {HANDLER_HELP}")
    if kind in _KINDS:
        return _kind_of_handler(kind)(rest)
    return _checked(name, _made(name, _found(name, kind, rest)))


def _kind_of_handler(kind: str) -> Callable[[str], ModelHandler[Any, Any, Any]]:
    from luminosity.inference.handlers.images.handlers import ImageClassifier, ImageEmbedder
    from luminosity.inference.handlers.text.classifiers import TextClassifier
    from luminosity.inference.handlers.text.embedder import SentenceEmbedder
    from luminosity.inference.handlers.text.summarizer import Summarizer
    from luminosity.inference.handlers.trees.lightgbm import LightGBMModelHandler
    from luminosity.inference.handlers.trees.xgboost import XGBoostModelHandler

    images = (ImageEmbedder, ImageClassifier)
    trees = (_trees(XGBoostModelHandler), _trees(LightGBMModelHandler))
    makers = (SentenceEmbedder, TextClassifier, Summarizer, _generator, _chat, *images, *trees)
    return makers[_KINDS.index(kind)]


def _trees(handler: Callable[..., ModelHandler[Any, Any, Any]]) -> Callable[[str], ModelHandler[Any, Any, Any]]:
    def made(name: str) -> ModelHandler[Any, Any, Any]:
        path, _, method = name.partition("#")
        return handler(os.path.expanduser(path), method=method or "predict")

    return made


def generator_named(model: str, key_env: str | None = None) -> ModelHandler[Any, Any, Any]:
    """Return a handler that answers chats: on a server (``URL#MODEL``), of a module, or in the process.

    ``key_env`` is the environment variable with the server's key.
    """
    if "://" in model:
        return _chat(model, key_env)
    if "#" in model and not os.path.exists(os.path.expanduser(model)):
        raise OptionError(
            f"{model}: found no http:// or https:// before the address, expected URL#MODEL", fix=f"write http://{model}"
        )
    if key_env is not None:
        raise OptionError(f"found the variable {key_env} for a key, but {model} is not on a server")
    if ":" in model and not os.path.exists(model):
        return named_handler(model)
    return _generator(model)


def _generator(model: str) -> ModelHandler[Any, Any, Any]:
    from luminosity.inference.handlers.text.generator import TextGenerator

    path = os.path.expanduser(model)
    return TextGenerator(path, max_new_tokens=_NEW_TOKENS, generation_args={"do_sample": False})


def _chat(model: str, key_env: str | None = None) -> ModelHandler[Any, Any, Any]:
    from luminosity.inference.handlers.http.http_handler import HttpModelHandler

    url, _, name = model.partition("#")
    if not name:
        raise OptionError(
            f"{model}: found no name of a model, expected URL#MODEL, such as http://localhost:8000#llama-3.1-8b"
        )
    return HttpModelHandler.chat(url, name, parameters={"temperature": 0}, api_key_env=key_env)


def _found(name: str, module_name: str, path: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its own imports does not: the traceback says which
        near = [file.stem for file in Path.cwd().glob("*.py")]
        raise OptionError(
            f"{name}: found no module {error.name!r}, neither installed nor in {os.getcwd()}",
            fix=did_you_mean(module_name, [*_KINDS, *near]) or None,
        ) from None
    owner = f"the module {module_name}"
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            public = [each for each in dir(found) if each[0] != "_"]
            raise OptionError(
                f"{name}: {owner} has no {attribute!r}", fix=did_you_mean(attribute, public, most=3) or None
            )
        found, owner = getattr(found, attribute), attribute
    return found


def _made(name: str, found: Any) -> Any:
    """Return the object itself, or call it if it is a class or a function without arguments."""
    from apache_beam.ml.inference.base import ModelHandler

    if not callable(found) or isinstance(found, ModelHandler):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise OptionError(
            f"{name}: {error}", fix="name a handler, or a function without arguments that makes one"
        ) from None
    return found()


def _checked(name: str, handler: Any) -> ModelHandler[Any, Any, Any]:
    from luminosity.inference.adapting.adapt import adapt

    try:
        adapt(handler)
    except InvalidType as error:
        raise OptionError(f"{name}: {error.message}", fix=error.fix) from None
    if list(handler.get_preprocess_fns()) or list(handler.get_postprocess_fns()):
        raise OptionError(
            f"{name} has functions before or after the model, which only a pipeline runs",
            fix="name the handler without them",
        )
    return handler
