"""What a model takes and gives, in KServe's words; clients read the names and datatypes of tensors there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from luminosity.errors import OptionError
from luminosity.inference.handler import Handler
from luminosity.inference.handlers.text import TextHandler
from luminosity.inference.serving.tensors import DATATYPES, OUTPUT, datatype_of

__all__ = ["declared_inputs", "known_inputs", "known_outputs"]

Described = dict[str, Any]


def declared_inputs(declared: Sequence[str]) -> list[Described]:
    """Inputs as a user writes them.

    >>> declared_inputs(["pixels:FP32:224,224,3"])
    [{'name': 'pixels', 'datatype': 'FP32', 'shape': [-1, 224, 224, 3]}]
    """
    return [_declared(each) for each in declared]


def known_inputs(handler: Handler[Any, Any, Any]) -> list[Described]:
    """Those of a handler that tells; of others nothing is known."""
    return [_described("input", "BYTES")] if isinstance(handler, TextHandler) else []


def known_outputs(handler: Handler[Any, Any, Any]) -> list[Described]:
    """What `output_type` says, if anything.

    >>> class Embedder(Handler):
    ...     output_type = pa.list_(pa.float32(), 384)
    >>> known_outputs(Embedder())
    [{'name': 'output', 'datatype': 'FP32', 'shape': [-1, 384]}]
    """
    kind: Any = handler.output_type
    if kind is None:
        return []
    sizes: list[int] = []
    while pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size if pa.types.is_fixed_size_list(kind) else -1)
        kind = kind.value_type
    datatype = datatype_of(kind.to_pandas_dtype()) if pa.types.is_primitive(kind) else None
    return [_described(OUTPUT, datatype, sizes) if datatype else _described(OUTPUT, "BYTES")]


def _described(name: str, datatype: str, sizes: Sequence[int] = ()) -> Described:
    return {"name": name, "datatype": datatype, "shape": [-1, *sizes]}


def _declared(text: str) -> Described:
    name, _, rest = text.partition(":")
    datatype, colon, sizes = rest.partition(":")
    try:
        numbers = [int(size) for size in sizes.split(",")] if colon else []
    except ValueError:
        numbers = [0]
    if not name or datatype not in DATATYPES or any(size < 1 and size != -1 for size in numbers):
        raise OptionError(
            f"--input={text}: expected NAME:DATATYPE or NAME:DATATYPE:SIZE,SIZE with one of {', '.join(DATATYPES)}"
        )
    return _described(name, datatype, numbers)
