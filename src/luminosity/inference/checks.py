"""What authors of handlers get wrong, said where it can be seen first."""

from __future__ import annotations

from typing import Any

from apache_beam.ml.inference.base import ModelHandler

from luminosity.inference.handler import Handler

__all__ = ["check_handler"]


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
