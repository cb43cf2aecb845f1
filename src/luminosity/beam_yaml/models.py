"""Models in YAML: a name as commands take it, or a handler's class with its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from apache_beam.ml.inference.base import ModelHandler

import luminosity
from luminosity._shared.text import did_you_mean
from luminosity.errors import InvalidArgument, OptionError
from luminosity.inference.enrich.column import Column, model_of
from luminosity.inference.model_names import named_handler

__all__ = ["HANDLERS", "check_keys", "column_of", "handler_of", "output_type_of", "type_of"]

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

_COLUMN_KEYS = ("model", "inputs", "output", "inference_args")
_EXPECTED = f"a name such as embed:MODEL or module:object, or type: (one of {', '.join(HANDLERS)}) and config:"


def handler_of(spec: Any) -> ModelHandler[Any, Any, Any]:
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
    return Column(handler_of(spec["model"]), spec["inputs"], output, inference_args=spec.get("inference_args"))


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
