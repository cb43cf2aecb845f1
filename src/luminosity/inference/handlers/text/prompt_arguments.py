"""Examples of a generator: a prompt or messages, alone or with arguments of their own; and their prepared form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa

from luminosity._shared.text import did_you_mean
from luminosity.errors import InvalidArgument
from luminosity.inference.blocks import Block

__all__ = ["RowArguments", "arguments_of", "ids_of", "limits_of", "split", "with_arguments"]

RowArguments: TypeAlias = "dict[str, Any]"
"""Arguments of ``generate`` for one example; empty if it has none of its own."""
_ALLOWED = ("do_sample", "max_new_tokens", "seed", "stop_strings", "temperature", "top_k", "top_p")
_ASKS = ("messages", "prompt")


def split(example: Any) -> tuple[Any, RowArguments]:
    """Return the prompt or the messages of an example, and its own arguments.

    >>> split("Hello"), split({"prompt": "Hello", "max_new_tokens": 8})
    (('Hello', {}), ('Hello', {'max_new_tokens': 8}))
    """
    if not isinstance(example, Mapping):
        return example, {}
    given = dict(cast("Mapping[str, Any]", example))
    asked = [given.pop(name) for name in _ASKS if name in given]
    if len(asked) != 1:
        raise InvalidArgument(
            f"found an example with the keys {sorted(example)}, expected either 'prompt' or 'messages'"
        )
    for name in given:
        if name not in _ALLOWED:
            raise InvalidArgument(
                f"found the argument {name!r} in an example, expected some of {', '.join(_ALLOWED)}",
                fix=did_you_mean(name, _ALLOWED),
            )
    return asked[0], given


def with_arguments(ids: Any, arguments: Sequence[RowArguments]) -> Block:
    """Return the token ids of prompts with the arguments of each; the ids alone if no example has any."""
    if not any(arguments):
        return ids
    texts = pa.array([json.dumps(each) if each else None for each in arguments], pa.string())
    return pa.StructArray.from_arrays([ids, texts], ["ids", "arguments"])


def ids_of(prepared: Block) -> Any:
    """Return the token ids of prepared prompts, as an Arrow list array."""
    if isinstance(prepared, list):  # of blocks with and without arguments
        rows = [each["ids"] if isinstance(each, dict) else each for each in cast("list[Any]", prepared)]
        return pa.array(rows, pa.list_(pa.int32()))
    return prepared.field("ids") if pa.types.is_struct(prepared.type) else prepared


def arguments_of(prepared: Block) -> list[RowArguments]:
    """Return the own arguments of each prepared prompt."""
    if isinstance(prepared, list):
        texts = [each["arguments"] if isinstance(each, dict) else None for each in cast("list[Any]", prepared)]
    elif pa.types.is_struct(prepared.type):
        texts = prepared.field("arguments").to_pylist()
    else:
        return [{}] * len(prepared)
    return [json.loads(text) if text else {} for text in texts]


def limits_of(prepared: Block, usual: int) -> Any:
    """Return how many tokens may follow each prompt."""
    return np.array([each.get("max_new_tokens", usual) for each in arguments_of(prepared)], np.int64)
