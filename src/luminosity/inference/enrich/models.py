"""A column's handler as the model host wants it."""

from __future__ import annotations

from typing import Any

from apache_beam.ml.inference.base import ModelHandler, PredictionResult

from luminosity.inference.adapt import adapt
from luminosity.inference.blocks import Block, rows
from luminosity.inference.columnar.adapt import takes_tensors, whole_columns
from luminosity.inference.columnar.tensors import OfTensors
from luminosity.inference.handler import Handler
from luminosity.inference.handlers.plain import from_tensor
from luminosity.inference.wrapping import WrappedHandler

__all__ = ["model_of"]


def model_of(handler: ModelHandler[Any, Any, Any]) -> Handler[Any, Any, Any]:
    """The handler with all hooks, giving values alone."""
    if isinstance(handler, Handler):
        return handler
    return whole_columns(handler) or _Values(OfTensors(adapt(handler)) if takes_tensors(handler) else adapt(handler))


class _Values(WrappedHandler):
    """Beam's handlers give PredictionResults, with an example and a name in each."""

    def collect(self, outputs: Any) -> Block:
        return [_value(each) for each in rows(super().collect(outputs))]


def _value(result: Any) -> Any:
    value: Any = result.inference if isinstance(result, PredictionResult) else result
    return from_tensor(value) if hasattr(value, "detach") else value
