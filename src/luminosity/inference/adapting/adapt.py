"""Turns any Beam ``ModelHandler`` into a ``Handler``."""

from __future__ import annotations

from typing import Any, cast

from apache_beam.ml.inference import base
from apache_beam.ml.inference.base import ModelHandler, PredictionResult

from luminosity.inference.adapting.checks import check_handler
from luminosity.inference.adapting.wrapping import BeamContract, WrappedHandler
from luminosity.inference.blocks import Block
from luminosity.inference.handler import Handler

__all__ = ["adapt", "adapt_keyed", "without_functions"]

_REMOTE_CONCURRENCY = 4  # calls of a remote model at once: they wait for the network, not for a device
_OUTER = (base._PreProcessingModelHandler, base._PostProcessingModelHandler)  # pyright: ignore[reportPrivateUsage]
_PREBATCHED = base._PrebatchedModelHandler  # pyright: ignore[reportPrivateUsage]


def adapt(handler: ModelHandler[Any, Any, Any]) -> Handler[Any, Any, Any]:
    """Return ``handler`` with all hooks: itself if it is a ``Handler``, otherwise a wrapper around it.

    Pre- and postprocessing functions run as steps of their own, so their wrappers are removed. A handler of many models
    is one model here, and loads them as Beam does; :class:`~luminosity.inference.adapting.model_set.ModelSet` is how
    our own transform runs them.
    """
    check_handler(handler)
    inner: Any = handler
    if isinstance(handler, _PrebatchedHandler):
        return handler
    if isinstance(handler, _PREBATCHED) or handler.should_skip_batching():
        return _PrebatchedHandler(handler)
    if isinstance(handler, Handler):
        return handler
    if isinstance(handler, _OUTER):
        return adapt(without_functions(handler))
    if isinstance(handler, base.MaybeKeyedModelHandler):
        return _KeyedHandler(adapt(inner._unkeyed), handler, may_be_unkeyed=True)
    if isinstance(handler, base.KeyedModelHandler) and inner._single_model:
        return _KeyedHandler(adapt(inner._unkeyed), handler, may_be_unkeyed=False)
    return _BeamHandler(handler)


def adapt_keyed(handler: ModelHandler[Any, Any, Any]) -> Handler[Any, Any, Any]:
    """Return ``handler`` adapted for examples with keys, which the handler itself does not see."""
    return _KeyedHandler(adapt(handler), handler, may_be_unkeyed=False)


def without_functions(handler: ModelHandler[Any, Any, Any]) -> ModelHandler[Any, Any, Any]:
    """Return the handler inside the wrappers that add pre- and postprocessing functions."""
    inner: Any = handler
    while isinstance(inner, _OUTER):
        inner = getattr(inner, "_base")  # noqa: B009  # a private attribute of Beam's
    return inner


class _BeamHandler(BeamContract):
    """A handler that has only ``run_inference``. Its results are final and contain the examples."""

    def __init__(self, handler: ModelHandler[Any, Any, Any]) -> None:
        super().__init__(handler)
        if isinstance(handler, base.RemoteModelHandler):
            self.concurrency = _REMOTE_CONCURRENCY

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return list(self._handler.run_inference(batch, model, inference_args))

    def result(self, example: Any, value: Any, model_id: str | None, drop_example: bool) -> Any:
        return _without_example(value) if drop_example else value


class _PrebatchedHandler(_BeamHandler):
    """A handler whose elements are batches made by the user: each is one call of the model."""

    self_batching = True

    def collate(self, prepared: Block) -> Any:
        return prepared[0]

    def num_examples(self, collated: Any, count: int) -> int:
        return len(collated)

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return [super().predict(model, batch, inference_args)]

    def result(self, example: Any, value: Any, model_id: str | None, drop_example: bool) -> Any:
        return [_without_example(each) for each in value] if drop_example else value


class _KeyedHandler(WrappedHandler):
    """Removes the keys from examples before the model sees them and puts them back into the results."""

    def __init__(
        self, inner: Handler[Any, Any, Any], keyed: ModelHandler[Any, Any, Any], *, may_be_unkeyed: bool
    ) -> None:
        super().__init__(inner, keyed)
        self._may_be_unkeyed = may_be_unkeyed

    def prepare(self, block: Block) -> Block:
        if self._may_be_unkeyed and not isinstance(block[0], tuple):
            return self._inner.prepare(block)
        _, examples = zip(*block, strict=True)
        return self._inner.prepare(list(examples))

    def result(self, example: Any, value: Any, model_id: str | None, drop_example: bool) -> Any:
        if self._may_be_unkeyed and not isinstance(example, tuple):
            return self._inner.result(example, value, model_id, drop_example)
        key, unkeyed = example
        return key, self._inner.result(unkeyed, value, model_id, drop_example)


def _without_example(value: Any) -> Any:
    if isinstance(value, PredictionResult):
        return cast("Any", value)._replace(example=None)
    if isinstance(value, tuple) and len(cast("tuple[Any, ...]", value)) == 2 and isinstance(value[1], PredictionResult):
        return value[0], cast("Any", value[1])._replace(example=None)
    return value
