"""Handlers that wrap another handler and change only a part of it, such as the version of its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy.typing as npt
import pyarrow as pa
from apache_beam.ml.inference.base import ModelHandler, PredictionResult

from luminosity._shared.accelerators import accelerators_of
from luminosity.errors import InvalidArgument
from luminosity.inference.blocks import Block, sample
from luminosity.inference.files.local import check_exists
from luminosity.inference.handler import Handler
from luminosity.inference.registry.resolved import ResolvedModel

__all__ = ["BeamContract", "NewVersion", "RegisteredHandler", "WrappedHandler"]
_BEAM = "apache_beam.ml.inference."
_NO_ONNX_MODEL = ("DecodeError", "InvalidGraph", "InvalidProtobuf")
_BEAM_PATHS = ("_model_uri", "_state_dict_path", "_torch_script_model_path", "_model_state")


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

    @property
    def accelerators(self) -> tuple[str, ...] | None:
        """The kinds of accelerators that the wrapped handler's model uses."""
        return accelerators_of(self._handler)

    def path_of_model(self) -> str | None:
        """Return the path that the wrapped handler was given. Beam's handlers keep it in a private attribute."""
        inner: Any = self._handler
        while not isinstance(inner, Handler) and isinstance(getattr(inner, "_base", None), ModelHandler):
            inner = getattr(inner, "_base")  # noqa: B009  # Beam's wrapper for batches that the user made
        if isinstance(inner, Handler):
            return inner.path_of_model()
        named = (getattr(inner, name, None) for name in (*_BEAM_PATHS, "model_id"))
        return next((each for each in named if isinstance(each, str) and each), None)

    def check_files(self) -> None:
        """Raise if a file that the wrapped handler names is not on this machine.

        A handler of Beam's names its files in private attributes. If a subclass loads its model in its own way, they
        may mean something else.
        """
        inner: Any = self._handler
        if isinstance(inner, Handler):
            inner.check_files()
        elif type(inner).load_model.__module__.startswith(_BEAM):
            for name in _BEAM_PATHS:
                path = getattr(inner, name, None)
                if isinstance(path, str) and path:
                    check_exists(path)

    def load_model(self) -> Any:
        """Load the wrapped handler's model. Raises ``InvalidArgument`` for a file that is no ONNX model."""
        try:
            return self._handler.load_model()
        except Exception as error:
            is_onnx = type(self._handler).load_model.__module__ == f"{_BEAM}onnx_inference"
            if is_onnx and type(error).__name__ in _NO_ONNX_MODEL:  # of two libraries, which may not be installed
                raise InvalidArgument(f"{self.path_of_model()!r} is no ONNX model: {error}") from error
            raise

    def run_inference(self, batch: Any, model: Any, inference_args: dict[str, Any] | None = None) -> Iterable[Any]:
        """Return the wrapped handler's results for a batch of examples."""
        return self._handler.run_inference(batch, model, inference_args)

    def get_num_bytes(self, batch: Any) -> int:
        """Return the bytes of a batch, estimated from a sample if Beam would pickle the whole batch to count them."""
        if self._counts_bytes or not isinstance(batch, list):
            return self._handler.get_num_bytes(batch)
        # Beam pickles the whole batch for this metric, a third of a fast model's time; a sample is enough.
        some = sample(batch)
        return self._handler.get_num_bytes(some) * len(batch) // max(len(some), 1)

    def get_metrics_namespace(self) -> str:
        """Return the wrapped handler's namespace for metrics."""
        return self._handler.get_metrics_namespace()

    def get_resource_hints(self) -> dict[str, Any]:
        """Return the wrapped handler's resource hints."""
        return self._handler.get_resource_hints()

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        """Return the wrapped handler's arguments for Beam's ``BatchElements``."""
        return self._handler.batch_elements_kwargs()

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        """Raise if the wrapped handler does not take these ``inference_args``."""
        self._handler.validate_inference_args(inference_args)

    def update_model_path(self, model_path: str | None = None) -> None:
        """Switch the wrapped handler to another version of its model."""
        self._handler.update_model_path(model_path)

    def takes_updates(self) -> bool:
        """Return whether the wrapped handler can load a new version of its model."""
        inner: Any = self._handler
        if isinstance(inner, Handler):
            return inner.takes_updates()
        return type(inner).update_model_path is not ModelHandler.update_model_path

    def update_model_paths(self, model: Any, model_paths: Any = None) -> None:
        """Pass new paths, for models with keys, on to the wrapped handler."""
        self._handler.update_model_paths(model, model_paths)

    def get_preprocess_fns(self) -> Iterable[Callable[[Any], Any]]:
        """Return the functions that the wrapped handler applies to examples."""
        return self._handler.get_preprocess_fns()

    def get_postprocess_fns(self) -> Iterable[Callable[[Any], Any]]:
        """Return the functions that the wrapped handler applies to predictions."""
        return self._handler.get_postprocess_fns()

    def should_skip_batching(self) -> bool:
        """Return whether the elements of the wrapped handler are batches already."""
        return self._handler.should_skip_batching()

    def set_environment_vars(self) -> None:
        """Set the wrapped handler's environment variables in this process."""
        self._handler.set_environment_vars()

    def share_model_across_processes(self) -> bool:
        """Return whether the processes of a machine share the wrapped handler's model."""
        return self._handler.share_model_across_processes()

    def model_copies(self) -> int:
        """Return how many copies of its model the wrapped handler asks for."""
        return self._handler.model_copies()

    def override_metrics(self, metrics_namespace: str = "") -> bool:
        """Return whether the wrapped handler reports its own metrics instead of Beam's."""
        return self._handler.override_metrics(metrics_namespace)

    def should_garbage_collect_on_timeout(self) -> bool:
        """Return whether the wrapped handler's model is dropped after a timeout."""
        return self._handler.should_garbage_collect_on_timeout()


class WrappedHandler(BeamContract):
    """Passes all hooks on to the wrapped ``Handler``."""

    def __init__(self, inner: Handler[Any, Any, Any], handler: ModelHandler[Any, Any, Any] | None = None) -> None:
        super().__init__(inner if handler is None else handler)
        self._inner = inner
        self.self_batching = inner.self_batching
        self.concurrency = inner.concurrency
        self.columnar = inner.columnar
        self.takes_nulls = inner.takes_nulls
        self.prefers_one_copy = inner.prefers_one_copy

    @property
    def wrapped(self) -> Handler[Any, Any, Any]:
        """The handler inside."""
        return self._inner

    def __str__(self) -> str:
        return str(self._inner)

    def path_of_model(self) -> str | None:
        """Return the path that the wrapped handler was given."""
        return self._inner.path_of_model()

    def check_files(self) -> None:
        """Raise if the files of the wrapped handler's model can't be found from this process."""
        self._inner.check_files()

    def check_run_budget(self, max_cost: float) -> None:
        """Raise if the wrapped handler's model costs money, and its prices are not known."""
        self._inner.check_run_budget(max_cost)

    def takes_updates(self) -> bool:
        """Return whether the wrapped handler can load a new version of its model."""
        return self._inner.takes_updates()

    def check_prepares_like(self, first: Any) -> None:
        """Raise if the wrapped handler can't use examples that ``first``, or the handler in it, prepared."""
        self._inner.check_prepares_like(first._inner if isinstance(first, WrappedHandler) else first)

    def check_input_type(self, kind: pa.DataType) -> None:
        """Raise if the wrapped handler can't take values of this Arrow type."""
        self._inner.check_input_type(kind)

    @property
    def sums_costs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # some read a file for it
        """Whether a batch costs the sum of its examples' costs with the wrapped handler."""
        return self._inner.sums_costs

    @property
    def output_type(self) -> pa.DataType | None:  # type: ignore[override]  # some handlers read a file for it
        """The Arrow type of one prediction of the wrapped handler."""
        return self._inner.output_type

    @property
    def device(self) -> Any:
        """The device of the wrapped handler, or "cpu" if it names none."""
        return getattr(self._inner, "device", "cpu")

    @property
    def model_id(self) -> str | None:
        """The ``model_id`` of the wrapped handler."""
        return self._inner.model_id

    def prepare(self, block: Block) -> Block:
        """Prepare the examples with the wrapped handler."""
        return self._inner.prepare(block)

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return the wrapped handler's cost of each prepared example."""
        return self._inner.cost(prepared)

    def collate(self, prepared: Block) -> Any:
        """Collate the examples of one batch with the wrapped handler."""
        return self._inner.collate(prepared)

    def transfer(self, batch: Any) -> Any:
        """Move a batch to the device with the wrapped handler."""
        return self._inner.transfer(batch)

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        """Run the wrapped handler's model on a batch."""
        return self._inner.predict(model, batch, inference_args)

    def wait(self, outputs: Any) -> None:
        """Block until the wrapped handler's outputs are computed."""
        self._inner.wait(outputs)

    def collect(self, outputs: Any) -> Block:
        """Return the wrapped handler's value for each example."""
        return self._inner.collect(outputs)

    def warm_up(self, model: Any) -> None:
        """Warm up the model with the wrapped handler."""
        self._inner.warm_up(model)

    def memory(self, model: Any) -> int | None:
        """Return the bytes that the wrapped handler's model takes, or None to let the host measure."""
        return self._inner.memory(model)

    def abandon(self, model: Any) -> None:
        """Stop what the wrapped handler's model still computes."""
        self._inner.abandon(model)

    def submits(self, inference_args: Mapping[str, Any] | None) -> bool:
        """Return whether examples with these arguments go to the ``submit`` of the wrapped handler's model."""
        return self._inner.submits(inference_args)

    def is_repeatable(self, inference_args: Mapping[str, Any] | None) -> bool | None:
        """Return whether equal examples always get equal predictions of the wrapped handler."""
        return self._inner.is_repeatable(inference_args)

    def num_examples(self, collated: Any, count: int) -> int:
        """Return how many predictions the wrapped handler counts for a batch."""
        return self._inner.num_examples(collated, count)

    def get_num_bytes(self, batch: Any) -> int:
        """Return the bytes of a collated batch, as the wrapped handler counts them."""
        return self._inner.get_num_bytes(batch)

    def result(self, example: Any, value: Any, model_id: str | None, drop_example: bool) -> Any:
        """Return the wrapped handler's result for an example and its prediction."""
        return self._inner.result(example, value, model_id, drop_example)


class NewVersion(WrappedHandler):
    """A new version of the model that a pipeline started with; ``first`` is the handler that prepares its examples."""

    def __init__(self, inner: Handler[Any, Any, Any], first: Handler[Any, Any, Any]) -> None:
        super().__init__(inner)
        self._first = first

    def load_model(self) -> Any:
        """Load the new version. Raises if it can't use the examples that ``first`` prepares."""
        self._inner.check_prepares_like(self._first)
        return super().load_model()


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
