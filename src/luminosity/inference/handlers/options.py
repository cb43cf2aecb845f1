"""The keyword arguments that every handler takes, because Beam's do."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from apache_beam.ml.inference.base import ModelHandler

__all__ = ["beam_options"]


def beam_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of Beam's ModelHandler. It would drop a misspelt one in silence; here it is a TypeError.

    >>> beam_options({"max_batch_size": 8})
    {'max_batch_size': 8}
    """
    parameters = inspect.signature(ModelHandler.__init__).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY or p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    known.append("env_vars")
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(
            f"found the option(s) {', '.join(unknown)}, expected the handler's own or of {', '.join(known)}"
        )
    return dict(given)
