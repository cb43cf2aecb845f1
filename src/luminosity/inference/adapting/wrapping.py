"""Base classes for handlers that wrap another handler and change only a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy.typing as npt
import pyarrow as pa
from apache_beam.ml.inference.base import ModelHandler

from luminosity.inference.blocks import Block, sample
from luminosity.inference.handler import Handler

__all__ = ["BeamContract", "NewVersion", "WrappedHandler"]


class BeamContract(Handler[Any, Any, Any]):
    """Passes the methods of Beam's ``ModelHandler`` on to the wrapped handler."""

    def __init__(self, handler: ModelHandler[Any, Any, Any]) -> None:
        self._handler = handler
        self._counts_bytes = type(handler).get_num_bytes is not ModelHandler.get_num_bytes

    def __str__(self) -> str:
        return type(self._handler).__name__

    @property
    def device(self) -> Any:
        """The device of the wrapped handler. Beam's torch handlers keep it in a private attribute."""
        return getattr(self._handler, "device", None) or getattr(self._handler, "_device", "cpu")

    def load_model(self) -> Any:
        return self._handler.load_model()

    def run_inference(self, batch: Any, model: Any, inference_args: dict[str, Any] | None = None) -> Iterable[Any]:
        return self._handler.run_inference(batch, model, inference_args)

    def get_num_bytes(self, batch: Any) -> int:
        if self._counts_bytes or not isinstance(batch, list):
            return self._handler.get_num_bytes(batch)
        # Beam pickles the whole batch for this metric, a third of a fast model's time; a sample is enough.
        some = sample(batch)
        return self._handler.get_num_bytes(some) * len(batch) // max(len(some), 1)

    def get_metrics_namespace(self) -> str:
        return self._handler.get_metrics_namespace()

    def get_resource_hints(self) -> dict[str, Any]:
        return self._handler.get_resource_hints()

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        return self._handler.batch_elements_kwargs()

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        self._handler.validate_inference_args(inference_args)

    def update_model_path(self, model_path: str | None = None) -> None:
        self._handler.update_model_path(model_path)

    def takes_updates(self) -> bool:
        inner: Any = self._handler
        if isinstance(inner, Handler):
            return inner.takes_updates()
        return type(inner).update_model_path is not ModelHandler.update_model_path

    def update_model_paths(self, model: Any, model_paths: Any = None) -> None:
        self._handler.update_model_paths(model, model_paths)

    def get_preprocess_fns(self) -> Iterable[Callable[[Any], Any]]:
        return self._handler.get_preprocess_fns()

    def get_postprocess_fns(self) -> Iterable[Callable[[Any], Any]]:
        return self._handler.get_postprocess_fns()

    def should_skip_batching(self) -> bool:
        return self._handler.should_skip_batching()

    def set_environment_vars(self) -> None:
        self._handler.set_environment_vars()

    def share_model_across_processes(self) -> bool:
        return self._handler.share_model_across_processes()

    def model_copies(self) -> int:
        return self._handler.model_copies()

    def override_metrics(self, metrics_namespace: str = "") -> bool:
        return self._handler.override_metrics(metrics_namespace)

    def should_garbage_collect_on_timeout(self) -> bool:
        return self._handler.should_garbage_collect_on_timeout()


class WrappedHandler(BeamContract):
    """Passes all hooks on to the wrapped ``Handler``."""

    def __init__(self, inner: Handler[Any, Any, Any], handler: ModelHandler[Any, Any, Any] | None = None) -> None:
        super().__init__(inner if handler is None else handler)
        self._inner = inner
        self.self_batching = inner.self_batching
        self.concurrency = inner.concurrency
        self.columnar = inner.columnar

    def __str__(self) -> str:
        return str(self._inner)

    def takes_updates(self) -> bool:
        return self._inner.takes_updates()

    def check_prepares_like(self, first: Any) -> None:
        self._inner.check_prepares_like(first._inner if isinstance(first, WrappedHandler) else first)

    @property
    def output_type(self) -> pa.DataType | None:  # type: ignore[override]  # some handlers read a file for it
        return self._inner.output_type

    @property
    def device(self) -> Any:
        return getattr(self._inner, "device", "cpu")

    @property
    def model_id(self) -> str | None:
        return self._inner.model_id

    def prepare(self, block: Block) -> Block:
        return self._inner.prepare(block)

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        return self._inner.cost(prepared)

    def collate(self, prepared: Block) -> Any:
        return self._inner.collate(prepared)

    def transfer(self, batch: Any) -> Any:
        return self._inner.transfer(batch)

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return self._inner.predict(model, batch, inference_args)

    def wait(self, outputs: Any) -> None:
        self._inner.wait(outputs)

    def collect(self, outputs: Any) -> Block:
        return self._inner.collect(outputs)

    def warm_up(self, model: Any) -> None:
        self._inner.warm_up(model)

    def memory(self, model: Any) -> int | None:
        return self._inner.memory(model)

    def abandon(self, model: Any) -> None:
        self._inner.abandon(model)

    def num_examples(self, collated: Any, count: int) -> int:
        return self._inner.num_examples(collated, count)

    def get_num_bytes(self, batch: Any) -> int:
        return self._inner.get_num_bytes(batch)

    def result(self, example: Any, value: Any, model_id: str | None, drop_example: bool) -> Any:
        return self._inner.result(example, value, model_id, drop_example)


class NewVersion(WrappedHandler):
    """A new version of the model that a pipeline started with; ``first`` is the handler that prepares its examples."""

    def __init__(self, inner: Handler[Any, Any, Any], first: Handler[Any, Any, Any]) -> None:
        super().__init__(inner)
        self._first = first

    def load_model(self) -> Any:
        self._inner.check_prepares_like(self._first)
        return super().load_model()
