"""Handlers whose model has a name in a registry: they load one version of it, and say which."""

from __future__ import annotations

from typing import Any, cast

from apache_beam.ml.inference.base import PredictionResult

from luminosity.inference.adapting.wrapping import WrappedHandler
from luminosity.inference.blocks import Block
from luminosity.inference.handler import Handler
from luminosity.inference.registry.resolved import ResolvedModel

__all__ = ["RegisteredHandler"]


class RegisteredHandler(WrappedHandler):
    """Loads one version of a registered model. Predictions carry its name: ``models:/sentiment/7``."""

    def __init__(self, inner: Handler[Any, Any, Any], model: ResolvedModel) -> None:
        super().__init__(inner)
        self._model = model

    @property
    def model_id(self) -> str | None:
        """The name of the version."""
        return self._model.uri

    def load_model(self) -> Any:
        """Load the version. Blocks while its files are fetched; raises if they have another digest."""
        path = self._model.local_path()
        if path != self._inner.path_of_model():
            self._inner.update_model_path(path)
        return super().load_model()

    def collect(self, outputs: Any) -> Block:
        """Return the values; results that the handler made itself, as Beam's do, get the name of the version."""
        values = super().collect(outputs)
        return [self._named(value) for value in cast("list[Any]", values)] if isinstance(values, list) else values

    def _named(self, value: Any) -> Any:
        if isinstance(value, PredictionResult):
            return cast("Any", value)._replace(model_id=self.model_id)
        if isinstance(value, list):  # of a batch that the user made
            return [self._named(each) for each in cast("list[Any]", value)]
        return value
