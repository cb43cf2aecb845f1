"""The options that every handler takes: those of Beam's ModelHandler."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import TypedDict

__all__ = ["HandlerOptions", "checked"]


class HandlerOptions(TypedDict, total=False):
    """The keyword arguments of Beam's ModelHandler, which says what each means."""

    min_batch_size: int | None
    max_batch_size: int | None
    max_batch_duration_secs: int | None
    max_batch_weight: int | None
    element_size_fn: Callable[[Any], int] | None
    batch_length_fn: Callable[[Any], int] | None
    batch_bucket_boundaries: list[int] | None
    large_model: bool
    model_copies: int | None
    env_vars: dict[str, str]


def checked(options: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """The options as they are; Beam's ModelHandler would take a misspelt one and say nothing.

    >>> checked({"max_batch_sise": 8}, int)
    Traceback (most recent call last):
    TypeError: int got an unexpected keyword argument 'max_batch_sise'; did you mean 'max_batch_size'?
    """
    for name in options:
        if name not in HandlerOptions.__annotations__:
            alike = difflib.get_close_matches(name, HandlerOptions.__annotations__, 1)
            hint = f"; did you mean {alike[0]!r}?" if alike else ""
            raise TypeError(f"{owner.__name__} got an unexpected keyword argument {name!r}{hint}")
    return dict(options)
