"""What authors of handlers get wrong, said where it can be seen first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from apache_beam.ml.inference.base import ModelHandler

from luminosity.inference.batching.limits import warn_of_settings_without_meaning
from luminosity.inference.handler import Handler, limits_of

__all__ = ["check_batching", "check_handler"]


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


def check_batching(handlers: Iterable[Handler[Any, Any, Any]]) -> None:
    """Settings of batches that contradict each other are told here, not by a worker."""
    for handler in handlers:
        limits_of(handler)
        warn_of_settings_without_meaning(handler.batch_elements_kwargs())
