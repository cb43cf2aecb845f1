"""Any Beam ModelHandler as a Handler."""

from __future__ import annotations

from typing import Any, cast

from apache_beam.ml.inference import base
from apache_beam.ml.inference.base import ModelHandler, PredictionResult

from luminosity.inference.adapting.checks import check_handler
from luminosity.inference.adapting.wrapping import BeamContract, WrappedHandler
from luminosity.inference.blocks import Block
from luminosity.inference.handler import Handler

__all__ = ["adapt", "adapt_keyed", "without_functions"]

_REMOTE_CALLS_AT_ONCE = 4
_OUTER = (base._PreProcessingModelHandler, base._PostProcessingModelHandler)  # pyright: ignore[reportPrivateUsage]
_PREBATCHED = base._PrebatchedModelHandler  # pyright: ignore[reportPrivateUsage]


def adapt(handler: ModelHandler[Any, Any, Any]) -> Handler[Any, Any, Any]:
    """The handler with all hooks: those of its own where it is a Handler, else what Beam's contract tells.

    Functions before and after the model are steps of their own; their wrappers are looked through. A handler of many
    models is one here, which loads them as Beam would; see `ModelSet` for what our own transform does.
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
    """The same for examples with keys, of which the handler knows nothing."""
    return _KeyedHandler(adapt(handler), handler, may_be_unkeyed=False)


def without_functions(handler: ModelHandler[Any, Any, Any]) -> ModelHandler[Any, Any, Any]:
    """The handler within those that put functions before and after it."""
    inner: Any = handler
    while isinstance(inner, _OUTER):
        inner = getattr(inner, "_base")  # noqa: B009  # Beam's own, and private.
    return inner


class _BeamHandler(BeamContract):
    """A handler that has only `run_inference`: its results are final as they are, examples and all."""

    def __init__(self, handler: ModelHandler[Any, Any, Any]) -> None:
        super().__init__(handler)
        if isinstance(handler, base.RemoteModelHandler):
            self.concurrency = _REMOTE_CALLS_AT_ONCE

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return list(self._handler.run_inference(batch, model, inference_args))

    def result(self, example: Any, value: Any, model_id: str | None, drop_example: bool) -> Any:
        return _without_example(value) if drop_example else value


class _PrebatchedHandler(_BeamHandler):
    """Each element is a batch of the user's own: one call of the model, as it is."""

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
    """Examples with keys, a model that knows nothing of them: they are parted here, and joined in the result."""

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
