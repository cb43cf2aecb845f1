"""What all handlers of torch models share: the device, the way to it and back, one wait."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeVar, cast

from typing_extensions import Self, Unpack

from luminosity.core import WorkerShare
from luminosity.extras import require
from luminosity.inference.handler import ExampleT, Handler, HandlerOptions, PredictionT

__all__ = ["Batch", "Outputs", "TorchHandler", "choose_device", "dtype_named", "map_tensors", "module_bytes"]


T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """The inputs of one call of a model."""

    inputs: Any
    """Tensors, in dicts, lists and tuples."""
    count: int
    """How many examples it holds."""
    beside: Any = None
    """What `collect` needs of these examples and the device does not."""
    arrived: Any = None
    """The CUDA event after which the inputs are on the device; None where nothing is under way."""

    @property
    def nbytes(self) -> int:
        sizes: list[int] = []
        map_tensors(lambda tensor: sizes.append(tensor.nbytes), self.inputs)
        return sum(sizes)


@dataclass(frozen=True)
class Outputs:
    """What a model made of a batch; its tensors hold it once `done` is reached."""

    values: Any
    batch: Batch
    done: Any = None


class TorchHandler(Handler[ExampleT, PredictionT, Any]):
    """A handler whose model is a torch module.

    A subclass has `load_model`, `collate`, which makes a `Batch`, `compute` and `collect`. On a GPU, inputs go by
    a stream of their own from pinned memory, and `predict` returns when all is enqueued, the way back included.
    """

    def __init__(self, device: str, dtype: Any, **options: Unpack[HandlerOptions]) -> None:
        super().__init__(**options)
        self._asked_device = device
        self._dtype_name = None if dtype is None else str(dtype).removeprefix("torch.")

    def adjusted(self, device: str | None = None, dtype: str | None = None) -> Self:
        """A copy for another device, or with another dtype; None keeps what it has."""
        other = copy(self)
        other._asked_device = device or self._asked_device
        other._dtype_name = dtype or self._dtype_name
        return other

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """The model's outputs, on its device."""
        raise NotImplementedError(f"{type(self).__name__} has no `compute`")

    @cached_property
    def device(self) -> Any:
        """The device this process uses for the model."""
        return choose_device(self._asked_device)

    @cached_property
    def dtype(self) -> Any:
        """The model's dtype; None: as it was saved."""
        return dtype_named(self._dtype_name)

    def transfer(self, batch: Batch) -> Batch:
        if self.device.type != "cuda":
            return replace(batch, inputs=map_tensors(lambda tensor: tensor.to(self.device), batch.inputs))
        torch = require("torch", "torch")
        with torch.cuda.stream(self._copy_stream):
            inputs = map_tensors(lambda tensor: tensor.pin_memory().to(self.device, non_blocking=True), batch.inputs)
            return replace(batch, inputs=inputs, arrived=self._copy_stream.record_event())

    def predict(self, model: Any, batch: Batch, inference_args: dict[str, Any] | None = None) -> Outputs:
        torch = require("torch", "torch")
        with torch.inference_mode():
            if batch.arrived is None:
                return Outputs(self.compute(model, batch, inference_args or {}), batch)
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(batch.arrived)
            # The inputs' memory belongs to the copying stream, and must not be used again before this one is done.
            map_tensors(lambda tensor: tensor.record_stream(stream), batch.inputs)
            values = map_tensors(_start_back, self.compute(model, batch, inference_args or {}))
            # An event that sleeps: waiting for it must not keep a core busy.
            done = stream.record_event(torch.cuda.Event(blocking=True))
            return Outputs(values, replace(batch, inputs=None), done)

    def wait(self, outputs: Outputs) -> None:
        if outputs.done is not None:
            outputs.done.synchronize()

    def memory(self, model: Any) -> int | None:
        return module_bytes(model)

    @cached_property
    def _copy_stream(self) -> Any:
        return require("torch", "torch").cuda.Stream(self.device)

    def __getstate__(self) -> dict[str, Any]:
        """What a process makes for itself on first use stays there."""
        return {name: value for name, value in self.__dict__.items() if name not in _cached_names(type(self))}

    def forget(self) -> None:
        """Drop what was read from the model's files: they are other files now."""
        for name in _cached_names(type(self)) & self.__dict__.keys():
            del self.__dict__[name]


def map_tensors(function: Callable[[Any], Any], tree: T) -> T:
    """The same dicts, lists and tuples around what the function makes of each tensor."""
    torch = require("torch", "torch")
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return cast("T", {name: map_tensors(function, value) for name, value in cast("dict[Any, Any]", tree).items()})
    if isinstance(tree, list | tuple):
        branches = [map_tensors(function, value) for value in cast("list[Any]", tree)]
        return cast("T", branches if isinstance(tree, list) else tuple(branches))
    return tree


def _start_back(tensor: Any) -> Any:
    """A copy in pinned memory, which is there when the stream has come so far."""
    back = require("torch", "torch").empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return back.copy_(tensor, non_blocking=True)


def _cached_names(kind: type) -> set[str]:
    return {name for base in kind.__mro__ for name, member in vars(base).items() if isinstance(member, cached_property)}


def choose_device(asked: str) -> Any:
    """The torch device for "auto", "cpu", "gpu", "cuda:1", ...: upper or lower case, as Beam's handlers take them.

    "auto" is the GPU where this process has one. A GPU that is asked for and not there is the CPU, with a warning.

    >>> choose_device("CPU")
    device(type='cpu')
    """
    torch = require("torch", "torch")
    name = asked.lower()
    if name == "auto":
        return torch.device("cuda" if _usable_gpus() else "cpu")
    device = torch.device("cuda" if name == "gpu" else name)
    if device.type == "cuda" and (device.index or 0) >= _usable_gpus():
        _warn_of_missing_gpu(asked, _usable_gpus())
        return torch.device("cpu")
    return device


def dtype_named(name: Any) -> Any:
    """The torch dtype of this name, or None for none.

    >>> dtype_named("bfloat16")
    torch.bfloat16
    """
    if name is None:
        return None
    torch = require("torch", "torch")
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {name!r}, expected the name of a torch dtype, such as 'float32' or 'bfloat16'")
    return dtype


def module_bytes(module: Any) -> int:
    """What a module's parameters and buffers take; weights that are tied count once."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


@cache
def _usable_gpus() -> int:
    """How many GPUs this process can use; asked once, since the first use of one starts its driver."""
    share = WorkerShare.current()
    if share.pool and not share.devices:
        return 0  # a worker for the CPU: the driver is not even started
    torch = require("torch", "torch")
    if not torch.cuda.is_available():
        return 0
    try:
        torch.empty(1, device="cuda")
    except RuntimeError as error:
        _LOGGER.warning("torch sees a GPU and can't use it: %s", error)
        return 0
    return torch.cuda.device_count()


@cache
def _warn_of_missing_gpu(asked: str, found: int) -> None:
    _LOGGER.warning(
        "A model asks for the device %r, and this process can use %d GPUs: it runs on the CPU. On a machine with "
        "a GPU, look at CUDA_VISIBLE_DEVICES, at the installed build of torch, and at the step's resource hints.",
        asked,
        found,
    )
