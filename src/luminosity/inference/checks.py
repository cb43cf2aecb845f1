"""What authors of handlers get wrong, said where it can be seen first."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
import numpy.typing as npt
from apache_beam.ml.inference.base import ModelHandler

from luminosity.inference.handler import Handler

__all__ = ["check_handler", "check_values", "checked_costs"]


def check_handler(handler: Any) -> None:
    """Raise what would otherwise be raised in a worker, or never."""
    if isinstance(handler, type):
        raise TypeError(f"found the class {handler.__name__}, expected a handler: {handler.__name__}(...)")
    if not isinstance(handler, ModelHandler):
        raise TypeError(f"found {handler!r}, expected a ModelHandler, Beam's or a luminosity.Handler")
    kind: Any = type(handler)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(handler, Handler) and kind.predict is Handler.predict:
        hint = ""
        if kind.run_inference is not Handler.run_inference:
            hint = "; it has `run_inference`, which is all that a subclass of Beam's own ModelHandler needs"
        raise TypeError(f"{kind.__name__} has no method `predict(self, model, batch, inference_args=None)`{hint}")


def checked_costs(handler: Any, costs: Any, count: int) -> npt.NDArray[np.float64]:
    """What `cost` returned, if it is a number for each of so many examples."""
    try:
        found = np.asarray(costs, np.float64)
    except (TypeError, ValueError):
        found = None
    if found is None or found.shape != (count,):
        shape = type(costs).__name__ if found is None else f"an array of shape {found.shape}"
        raise ValueError(f"{handler}.cost returned {shape} for {count} examples; expected a number each")
    if not np.isfinite(found).all() or (found < 0).any():
        raise ValueError(f"{handler}.cost returned a number that is negative or not finite")
    return found


def check_values(handler: Any, values: Any, count: int) -> None:
    """What came of a batch must be as many values as it had examples."""
    kind = type(values).__name__
    if not isinstance(values, Sized):
        raise ValueError(
            f"{handler} returned an object of type {kind} for a batch; expected a list or an array with a prediction "
            "for each example"
        )
    if len(values) != count:
        raise ValueError(
            f"{handler} returned {len(values)} predictions for {count} examples, as a {kind}; expected one for each, "
            "in their order"
        )
    if isinstance(values, dict):
        raise ValueError(
            f"{handler} returned a dict of {count} for a batch; expected a list with a dict for each example"
        )
