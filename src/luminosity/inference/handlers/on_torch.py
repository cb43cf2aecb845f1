"""The base class of all handlers for torch models: devices and transfers; and the labels of classifiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal, TypeVar, cast

import numpy as np
import pyarrow as pa
from typing_extensions import Self, Unpack

from luminosity._shared.accelerators import accelerators_of_device
from luminosity.core import WorkerShare
from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.inference.handler import ExampleT, Handler, HandlerOptions, PredictionT
from luminosity.inference.handlers.padding import Array

__all__ = ["Batch", "Labels", "Outputs", "TorchHandler", "likely_labels", "map_tensors", "names_at"]

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """The inputs of one call of a model."""

    inputs: Any
    """Tensors, in dicts, lists and tuples."""
    count: int
    """The number of examples."""
    host_data: Any = None
    """Data about these examples that ``collect`` needs and the device does not."""
    arrived: Any = None
    """The CUDA event after which the inputs are on the device; None if there is no transfer to wait for."""

    @property
    def nbytes(self) -> int:
        """The size of the inputs in bytes."""
        sizes: list[int] = []
        map_tensors(lambda tensor: sizes.append(tensor.nbytes), self.inputs)
        return sum(sizes)


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model for a batch. Its tensors are valid after the CUDA event ``done``."""

    values: Any
    batch: Batch
    done: Any = None


class TorchHandler(Handler[ExampleT, PredictionT, Any]):
    """A handler whose model is a torch module.

    A subclass implements ``load_model``, ``collate``, which returns a ``Batch``, ``compute`` and ``collect``. On a GPU,
    inputs are copied from pinned memory by a separate stream, and ``predict`` returns when everything is enqueued,
    including the copy of the outputs.
    """

    def __init__(self, device: str, dtype: Any, **options: Unpack[HandlerOptions]) -> None:
        super().__init__(**options)
        self._requested_device = device
        self._dtype_name = None if dtype is None else str(dtype).removeprefix("torch.")

    def adjusted(self, device: str | None = None, dtype: str | None = None) -> Self:
        """Return a copy for another device or with another dtype; None keeps the current one."""
        other = copy(self)
        other._requested_device = device or self._requested_device
        other._dtype_name = dtype or self._dtype_name
        return other

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Return the model's outputs, on its device."""
        raise NotImplementedError(f"{type(self).__name__} has no method `compute`")

    @property
    def accelerators(self) -> tuple[str, ...] | None:
        """A GPU, unless the handler's device is the CPU."""
        return accelerators_of_device(self._requested_device)

    @cached_property
    def device(self) -> Any:
        """The torch device that this process uses for the model."""
        return choose_device(self._requested_device)

    @cached_property
    def dtype(self) -> Any:
        """The model's dtype, or None for the one it was saved with."""
        return dtype_named(self._dtype_name)

    def transfer(self, batch: Batch) -> Batch:
        """Copy the inputs to the device; on a GPU, from pinned memory and without waiting for the copy."""
        if self.device.type != "cuda":
            return replace(batch, inputs=map_tensors(lambda tensor: tensor.to(self.device), batch.inputs))
        torch = require("torch", "torch")
        with torch.cuda.stream(self._copy_stream):
            inputs = map_tensors(lambda tensor: tensor.pin_memory().to(self.device, non_blocking=True), batch.inputs)
            return replace(batch, inputs=inputs, arrived=self._copy_stream.record_event())

    def predict(self, model: Any, batch: Batch, inference_args: dict[str, Any] | None = None) -> Outputs:
        """Call ``compute``; on a GPU, return when it and the copy of its outputs are enqueued."""
        torch = require("torch", "torch")
        with torch.inference_mode():
            if batch.arrived is None:
                return Outputs(self.compute(model, batch, inference_args or {}), batch)
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(batch.arrived)
            # The copying stream owns the inputs' memory, and must not reuse it before this stream is done.
            map_tensors(lambda tensor: tensor.record_stream(stream), batch.inputs)
            values = map_tensors(_start_copy_back, self.compute(model, batch, inference_args or {}))
            # A blocking event: the thread that waits for it sleeps instead of spinning on a core.
            done = stream.record_event(torch.cuda.Event(blocking=True))
            return Outputs(values, replace(batch, inputs=None), done)

    def wait(self, outputs: Outputs) -> None:
        """Block until the outputs are computed and copied from the GPU."""
        if outputs.done is not None:
            outputs.done.synchronize()

    def memory(self, model: Any) -> int | None:
        """Return the bytes of the module's parameters and buffers."""
        return module_bytes(model)

    @cached_property
    def _copy_stream(self) -> Any:
        return require("torch", "torch").cuda.Stream(self.device)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out cached properties: each process computes them on first use."""
        return {name: value for name, value in self.__dict__.items() if name not in _cached_names(type(self))}

    def forget(self) -> None:
        """Drop everything cached from the model's files, after the path of the model has changed."""
        for name in _cached_names(type(self)) & self.__dict__.keys():
            del self.__dict__[name]


def map_tensors(function: Callable[[Any], Any], tree: T) -> T:
    """Return the same dicts, lists and tuples with ``function`` applied to each tensor."""
    torch = require("torch", "torch")
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return cast("T", {name: map_tensors(function, value) for name, value in cast("dict[Any, Any]", tree).items()})
    if isinstance(tree, list | tuple):
        branches = [map_tensors(function, value) for value in cast("list[Any]", tree)]
        return cast("T", branches if isinstance(tree, list) else tuple(branches))
    return tree


def _start_copy_back(tensor: Any) -> Any:
    """Start to copy a tensor to pinned memory; the copy is complete when the stream gets there."""
    back = require("torch", "torch").empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return back.copy_(tensor, non_blocking=True)


def _cached_names(kind: type) -> set[str]:
    return {name for base in kind.__mro__ for name, member in vars(base).items() if isinstance(member, cached_property)}


def choose_device(requested: str) -> Any:
    """Return the torch device for "auto", "cpu", "gpu", "cuda:1" and so on, in upper or lower case.

    "auto" is the GPU if this process has one. Without the requested GPU it is the CPU, with a warning.

    >>> choose_device("CPU")
    device(type='cpu')
    """
    torch = require("torch", "torch")
    name = requested.lower()
    if name == "auto":
        return torch.device("cuda" if _usable_gpus() else "cpu")
    device = torch.device("cuda" if name == "gpu" else name)
    if device.type == "cuda" and (device.index or 0) >= _usable_gpus():
        _warn_of_missing_gpu(requested, _usable_gpus())
        return torch.device("cpu")
    return device


def dtype_named(name: Any) -> Any:
    """Return the torch dtype of this name, or None for None.

    >>> dtype_named("bfloat16")
    torch.bfloat16
    """
    if name is None:
        return None
    torch = require("torch", "torch")
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(
            f"found dtype={name!r}, expected the name of a torch dtype, such as 'float32' or 'bfloat16'"
        )
    return dtype


def module_bytes(module: Any) -> int:
    """Return the size of a module's parameters and buffers; tied weights count once."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


@cache
def _usable_gpus() -> int:
    """Return how many GPUs this process can use. Cached: the first use of a GPU starts its driver."""
    share = WorkerShare.current()
    if share.pool and not share.devices:
        return 0  # a worker without a GPU must not start the driver
    torch = require("torch", "torch")
    if not torch.cuda.is_available():
        if any(device.startswith("gpu:") for device in share.devices):
            _LOGGER.warning(
                "This worker has the device %s, but torch %s can't use it: models run on the CPU, in this one process. "
                'Install a build of torch for CUDA, or pass device="CPU" to run them on all CPU workers.',
                ", ".join(share.devices),
                torch.__version__,
            )
        return 0
    try:
        torch.empty(1, device="cuda")
    except RuntimeError as error:
        _LOGGER.warning("torch finds a GPU but can't use it: %s", error)
        return 0
    return torch.cuda.device_count()


@cache
def _warn_of_missing_gpu(requested: str, found: int) -> None:
    _LOGGER.warning(
        "A model requests the device %r, but this process can use %d GPUs: it runs on the CPU. If the machine has a "
        "GPU, check CUDA_VISIBLE_DEVICES, the installed build of torch, and the step's resource hints.",
        requested,
        found,
    )


@dataclass(frozen=True)
class Labels:
    """The names of a classifier's outputs, and what the outputs mean."""

    names: tuple[str, ...]
    kind: Literal["one", "several", "regression"] = "one"
    """Whether an example has one label or any number of them, or the outputs are numbers of a regression."""

    @classmethod
    def of(cls, config: Any) -> Labels:
        """Return the labels in the configuration of a model of transformers, in the order of its outputs."""
        names = tuple(config.id2label[index] for index in range(config.num_labels))
        if config.problem_type == "regression":
            return cls(names, "regression")
        is_several = config.num_labels == 1 or config.problem_type == "multi_label_classification"
        return cls(names, "several" if is_several else "one")

    @property
    def are_several(self) -> bool:
        """Whether each label has a probability of its own."""
        return self.kind == "several"

    def scores(self, logits: Any) -> Any:
        """Return the scores of logits: softmax, sigmoid if labels are several, or a regression's outputs."""
        if self.kind == "regression":
            return logits
        return logits.sigmoid() if self.are_several else logits.softmax(dim=-1)


def names_at(names: Sequence[str], places: Array) -> Any:
    """Return an Arrow array of the names at these places.

    >>> names_at(["cat", "dog"], np.array([1, 0])).to_pylist()
    ['dog', 'cat']
    """
    return pa.array(names, pa.string()).take(pa.array(places))


def likely_labels(names: Sequence[str], scores: Array, threshold: float) -> Any:
    """Return an Arrow array with a list for each row of ``scores``: the labels whose score is high enough.

    >>> likely_labels(["cat", "dog"], np.array([[0.7, 0.9], [0.1, 0.2]]), 0.5).to_pylist()
    [['cat', 'dog'], []]
    """
    chosen = scores >= threshold
    offsets = np.concatenate([[0], chosen.sum(axis=1).cumsum()]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), names_at(names, np.nonzero(chosen)[1]))
