"""Arguments in YAML: those of the transforms in Python, with models and types by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.ml.inference.base import ModelHandler

import luminosity
from luminosity._shared.text import did_you_mean
from luminosity.errors import InvalidArgument, OptionError
from luminosity.inference.enrich.column import Column, model_of
from luminosity.inference.model_names import named_handler

__all__ = ["HANDLERS", "check_keys", "column_of", "output_type_of", "takes_arguments_of", "type_of"]

HANDLERS = (
    "HttpModelHandler",
    "ImageClassifier",
    "ImageEmbedder",
    "SentenceEmbedder",
    "Summarizer",
    "TextClassifier",
    "TextGenerator",
    "TokenClassifier",
)
"""Our handlers whose arguments can be written in YAML."""

_Make = Callable[[dict[str, Any]], beam.PTransform[Any, Any]]
_DESCRIBED = re.compile(r"^( +)(\w+): (.*(?:\n\1 +\S.*)*)", re.MULTILINE)  # an argument in a docstring
_COLUMN_KEYS = ("model", "inputs", "output", "inference_args")
_EXPECTED = f"a name such as embed:MODEL or module:object, or type: (one of {', '.join(HANDLERS)}) and config:"


def _handler_of(spec: Any) -> ModelHandler[Any, Any, Any]:
    """Return the handler that ``spec`` describes: a text such as ``embed:MODEL``, or a mapping with type and config."""
    if isinstance(spec, str):
        try:
            return named_handler(spec)
        except OptionError as error:
            raise InvalidArgument(error.message, fix=error.fix) from None
    if not isinstance(spec, Mapping) or "type" not in spec:
        raise InvalidArgument(f"found a model that is {spec!r}, expected {_EXPECTED}")
    check_keys(spec, ("type", "config"), "a model")
    kind = spec["type"]
    if kind not in HANDLERS:
        raise InvalidArgument(
            f"found a model of type {kind!r}, expected one of {', '.join(HANDLERS)}",
            fix=did_you_mean(kind, HANDLERS) or "write model: module:object for a handler of your own",
        )
    try:
        return getattr(luminosity, kind)(**(spec.get("config") or {}))
    except TypeError as error:
        raise InvalidArgument(f"{kind}: {error}") from None


def column_of(name: str, spec: Any) -> Column:
    """Return the new column that ``spec`` describes."""
    if not isinstance(spec, Mapping):
        raise InvalidArgument(f"found {name}: {spec!r}, expected a mapping with model: and inputs:")
    check_keys(spec, _COLUMN_KEYS, f"the column {name!r}")
    for key in ("model", "inputs"):
        if key not in spec:
            raise InvalidArgument(f"the column {name!r} has no {key}:, expected model: and inputs:")
    output = None if spec.get("output") is None else type_of(spec["output"])
    return Column(_handler_of(spec["model"]), spec["inputs"], output, inference_args=spec.get("inference_args"))


def output_type_of(column: Column) -> pa.DataType | None:
    """Return the type of a new column, or None if only the model knows it."""
    return model_of(column.handler).output_type if column.output is None else column.output


def type_of(name: Any) -> pa.DataType:
    """Return the Arrow type of a name such as ``int8`` or ``string``; a list of one name is the type of lists.

    >>> type_of("float32"), type_of(["float32"])
    (DataType(float), ListType(list<item: float>))
    """
    if isinstance(name, list) and len(name) == 1:
        return pa.list_(type_of(name[0]))
    try:
        return pa.type_for_alias(name)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"found the type {name!r}, expected a name such as bool, int64, float32, string or timestamp[us], "
            "or a list with one name"
        ) from None


def check_keys(spec: Mapping[str, Any], known: tuple[str, ...], owner: str) -> None:
    """Raise if a mapping has keys that it can't have."""
    for key in spec:
        if key not in known:
            raise InvalidArgument(
                f"found {key!r} in {owner}, expected {', '.join(known)}", fix=did_you_mean(str(key), known) or None
            )


def takes_arguments_of(
    transform: type[beam.PTransform[Any, Any]], without: tuple[str, ...] = (), **other: Any
) -> Callable[[_Make], Callable[..., beam.PTransform[Any, Any]]]:
    """Let a function be called with the arguments that a transform has in Python; it gets all of them, with defaults.

    Names, types, defaults and descriptions are those of the transform, but for arguments ``without`` which YAML has to
    do, since it can't write their values, and for ``other`` ones or other defaults. The docstring of the function may
    describe arguments in the words of YAML.
    """
    parameters = dict(list(inspect.signature(transform.__init__).parameters.items())[1:])
    for name in without:
        del parameters[name]
    for name, default in other.items():
        before = parameters.get(name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
        parameters[name] = before.replace(default=default)
    taken = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters.values()]

    def decorate(make: _Make) -> Callable[..., beam.PTransform[Any, Any]]:
        def made(**given: Any) -> beam.PTransform[Any, Any]:
            if unknown := [name for name in given if name not in parameters]:
                raise TypeError(f"{transform.__name__} got an unexpected keyword argument {unknown[0]!r}")
            if missing := [each.name for each in taken if each.default is each.empty and each.name not in given]:
                raise TypeError(f"missing {len(missing)} required arguments: {_listed(missing)}")
            return make({each.name: given.get(each.name, each.default) for each in taken})

        made.__name__, made.__doc__ = make.__name__, _described(make, transform, list(parameters))
        made.__signature__ = inspect.Signature(taken, return_annotation=beam.PTransform)  # pyright: ignore
        return made

    return decorate


def _listed(names: list[str]) -> str:
    """Return names as Python lists them in its errors.

    >>> _listed(["a", "b"]), _listed(["a", "b", "c"])
    ("'a' and 'b'", "'a', 'b', and 'c'")
    """
    *first, last = map(repr, names)
    return f"{', '.join(first)}{',' * (len(first) > 1)} and {last}" if first else last


def _described(make: _Make, transform: type, names: list[str]) -> str:
    """Return the function's docstring with a description of each argument: its own, or that of the transform."""
    said = {
        match[2]: " ".join(match[3].split())
        for each in (transform, transform.__init__, make)
        for match in _DESCRIBED.finditer((inspect.getdoc(each) or "").partition("Args:\n")[2])
    }
    short = (make.__doc__ or "").partition("\n")[0]
    return f"{short}\n\nArgs:\n" + "".join(f"    {name}: {said[name]}\n" for name in names if name in said)
