"""Checks of handlers while a pipeline is built, for mistakes that would otherwise show up only in a worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler

from luminosity.errors import InvalidType
from luminosity.inference.batching.limits import warn_of_settings_without_meaning
from luminosity.inference.handler import Handler, limits_of

__all__ = ["check_batching", "check_files", "check_handler"]


def check_handler(handler: Any) -> None:
    """Raise ``InvalidType`` if ``handler`` is not a usable ``ModelHandler``."""
    if isinstance(handler, type):
        raise InvalidType(
            f"found the class {handler.__name__}, expected an instance of it", fix=f"call it: {handler.__name__}(...)"
        )
    if not isinstance(handler, ModelHandler):
        raise InvalidType(f"found {handler!r}, expected a ModelHandler, Beam's or a luminosity.Handler")
    kind: Any = type(handler)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(handler, Handler) and kind.predict is Handler.predict:
        fix = None
        if kind.run_inference is not Handler.run_inference:
            fix = "subclass Beam's ModelHandler, which needs only the run_inference that the class has"
        raise InvalidType(f"{kind.__name__} has no method `predict(self, model, batch, inference_args=None)`", fix=fix)


def check_files(handlers: Iterable[Handler[Any, Any, Any]], pipeline: beam.Pipeline) -> None:
    """Raise ``ModelUnavailable`` if a model can't be found, if the pipeline's workers run on this machine.

    On other runners, only the workers may have the files. A runner says so with the attribute
    ``runs_on_this_machine``.
    """
    if getattr(pipeline.runner, "runs_on_this_machine", False):
        for handler in handlers:
            handler.check_files()


def check_batching(handlers: Iterable[Handler[Any, Any, Any]]) -> None:
    """Raise if a handler's batch settings contradict each other, and warn about settings without effect."""
    for handler in handlers:
        limits_of(handler)
        warn_of_settings_without_meaning(handler.batch_elements_kwargs())
