"""A model on the model host of this process, called by request threads instead of bundles."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apache_beam.ml.inference.base import PredictionResult

from luminosity.inference.blocks import rows
from luminosity.inference.files.local import use_cache
from luminosity.inference.handler import Handler
from luminosity.inference.host.host import host_of
from luminosity.inference.host.interface import LaneSettings
from luminosity.inference.options import ModelCacheConfig
from luminosity.inference.preparing import Prepared, Preparer
from luminosity.inference.serving.requests import RequestError
from luminosity.inference.threads import limit_threads

__all__ = ["ServedModel"]


@dataclass(frozen=True)
class Predictions:
    """A value for each example, and the total cost of the examples, which for texts is the number of tokens."""

    values: list[Any]
    cost: int


@dataclass
class Counts:
    """Counts of the server's work so far."""

    requests: int = 0
    examples: int = 0
    batches: int = 0


class ServedModel:
    """Loads a model and predicts for any number of threads. Examples of requests at the same time share batches."""

    def __init__(self, handler: Handler[Any, Any, Any], name: str, inputs: Sequence[dict[str, Any]] = ()) -> None:
        self.handler = handler
        self.name = name
        self.inputs = list(inputs)
        """The inputs that the user declares, for KServe clients."""
        self.counts = Counts()
        self._counting = threading.Lock()
        limit_threads()
        use_cache(ModelCacheConfig())
        handler.set_environment_vars()
        self._preparer = Preparer(handler)
        self._host = host_of(handler)
        tag = uuid.uuid4().hex
        # A bad example of one request must not fail other requests in its batch.
        self._lane = self._host.enter(tag, lambda: handler, LaneSettings(isolate_failures=True))

    def load(self) -> None:
        """Load the model. Blocks until it is loaded."""
        self._host.load(self._lane)

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded and its host works."""
        return self._lane.model.is_ready and self._host.broken is None

    def predict(self, examples: list[Any]) -> Predictions:
        """Return the values of these examples, in their order. Blocks.

        Raises ``RequestError`` if the model can't take them or fails.
        """
        prepared = self._prepare(examples)
        values: list[Any] = [None] * len(examples)
        session = self._host.open()
        try:
            session.submit(self._lane, prepared.block, prepared.costs, None, prepared.weights)
            for outcomes in session.finish():
                for outcome in outcomes:
                    if outcome.error is not None:
                        raise RequestError(500, f"the model failed: {_describe(outcome.error)}") from outcome.error
                    for place, value in zip(outcome.places.tolist(), rows(outcome.values), strict=True):
                        values[place] = self._value(examples[place], value, outcome.model_id)
            batches = len(session.take_stats().get(self._lane, []))
        finally:
            session.close()
        with self._counting:
            self.counts.requests += 1
            self.counts.examples += len(examples)
            self.counts.batches += batches
        return Predictions(values, int(prepared.costs.sum()))

    def close(self) -> None:
        """Release the model."""
        self._host.leave(self._lane)

    def _prepare(self, examples: list[Any]) -> Prepared:
        try:
            return self._preparer.prepare(examples)
        except Exception as error:
            raise RequestError(400, f"the model can't take this input: {_describe(error)}") from error

    def _value(self, example: Any, value: Any, model_id: str | None) -> Any:
        result = self.handler.result(example, value, model_id, True)
        return result.inference if isinstance(result, PredictionResult) else result


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
