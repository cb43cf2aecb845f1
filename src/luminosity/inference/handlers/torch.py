"""``TorchModelHandler``: any torch module as a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from apache_beam.ml.inference.base import PredictionResult
from typing_extensions import Unpack

from luminosity.errors import HandlerError, InvalidArgument
from luminosity.extras import require
from luminosity.inference.blocks import Block, rows
from luminosity.inference.files.local import check_exists, local_copy
from luminosity.inference.handler import HandlerOptions
from luminosity.inference.handlers.columns import to_columns, to_numpy, to_tree
from luminosity.inference.handlers.on_torch import Batch, Outputs, TorchHandler, map_tensors
from luminosity.inference.handlers.padding import Array, pad_or_stack

__all__ = ["TorchModelHandler"]


InferenceFn = Callable[..., Iterable[PredictionResult]]


class TorchModelHandler(TorchHandler[Any, PredictionResult]):
    """Runs a torch module over tensors or numpy arrays, or over dicts of them, which become keyword arguments.

    >>> import torch
    >>> handler = TorchModelHandler(model_class=torch.nn.Flatten, model_params={"start_dim": 1})
    >>> [result] = handler.run_inference([np.array([[1, 2], [3, 4]])], handler.load_model())
    >>> result.inference
    array([1, 2, 3, 4])

    Examples of one shape are stacked. If their lengths (the first dimension) differ, the shorter ones are padded at the
    end. A prediction is the model's row for the example: a numpy array, or dicts and tuples of arrays if the model
    returns those. Numpy has no bfloat16, so such outputs become float32.

    Args:
        state_dict_path: the weights for ``model_class``: safetensors, or a file written by ``torch.save``. Not needed
            if ``model_class`` loads its own weights.
        model_class: a class, or any function, that returns a module.
        model_params: the keyword arguments of ``model_class``.
        device: "auto" (the GPU if this process has one), "CPU", "GPU", "cuda:1" and so on.
        torch_script_model_path: a TorchScript file, instead of ``model_class``.
        exported_model_path: a file written by ``torch.export.save``, instead of ``model_class``.
        load_model_args: passed to the function that reads the file.
        inference_fn: called instead of the module, with the signature of Beam's ``PytorchModelHandlerTensor``. It gets
            the examples one by one, without padding.
        dtype: the type of the weights and of floating-point inputs, such as "bfloat16".
        compile: compile the module, and pad to few different lengths.
        pad_value: fills the end of shorter examples.
        mask: the name of a keyword argument that the module gets: ones for an example's own values, zeros for padding.
            If examples are dicts, it describes their first entry.
        output: "numpy", or "torch" for tensors, as Beam's own handler returns them.
        warm_up_example: an example to run once after the model is loaded.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``large_model``, ``env_vars`` and so on.

    The ``inference_args`` of RunInference are passed to the module as keyword arguments.
    """

    def __init__(
        self,
        state_dict_path: str | None = None,
        model_class: Callable[..., Any] | None = None,
        model_params: Mapping[str, Any] | None = None,
        device: str = "auto",
        *,
        torch_script_model_path: str | None = None,
        exported_model_path: str | None = None,
        load_model_args: Mapping[str, Any] | None = None,
        inference_fn: InferenceFn | None = None,
        dtype: Any = None,
        compile: bool = False,
        pad_value: float = 0,
        mask: str | None = None,
        output: Literal["numpy", "torch"] = "numpy",
        warm_up_example: Any = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(device, dtype, **options)
        if output not in ("numpy", "torch"):
            raise InvalidArgument(f"found output={output!r}, expected 'numpy' or 'torch'")
        if inference_fn is not None and mask is not None:
            raise InvalidArgument(
                f"found mask={mask!r} with inference_fn, which gets examples without padding",
                fix="leave mask= or inference_fn= out",
            )
        self._files = ModuleFiles(
            state_dict_path,
            model_class,
            dict(model_params or {}),
            torch_script_model_path,
            exported_model_path,
            dict(load_model_args or {}),
        )
        self._inference_fn = inference_fn
        self.columnar = inference_fn is None
        self._compile = compile
        self._pad_value = pad_value
        self._mask = mask
        self._output = output
        self._warm_up_example = warm_up_example

    @property
    def model_id(self) -> str | None:
        """The path of the model's file, or None if ``model_class`` loads its own weights."""
        return self._files.path

    def check_files(self) -> None:
        """Raise if the model's file is not on this machine."""
        if self._files.path is not None:
            check_exists(self._files.path)

    def update_model_path(self, model_path: str | None = None) -> None:
        """Switch to another file of the same model."""
        if model_path:
            self._files = self._files.at(model_path)

    def get_metrics_namespace(self) -> str:
        """Return Beam's namespace for the metrics of torch models."""
        return "BeamML_PyTorch"

    def load_model(self) -> Any:
        """Load the module onto its device, convert it to ``dtype``, and compile it if ``compile`` is set."""
        module = self._files.load(self.device)
        if self.dtype is not None:
            module = module.to(self.dtype)
        return require("torch", "torch").compile(module, dynamic=True) if self._compile else module

    def warm_up(self, model: Any) -> None:
        """Run the model once on ``warm_up_example``, if there is one."""
        if self._warm_up_example is not None:
            list(self.run_inference([self._warm_up_example], model))

    def prepare(self, block: Block) -> Block:
        """Return numpy arrays, which are cheaper to send between processes than tensors, or a table's whole columns."""
        if isinstance(block, np.ndarray):
            return block
        if isinstance(block, pa.RecordBatch | pa.Array) and self._inference_fn is None and not _is_ragged(block):
            columns = to_columns(block)
            return columns if isinstance(columns, pa.RecordBatch) else to_numpy(columns)
        return [_arrays_of(example) for example in rows(block)]

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return how many numbers each example holds."""
        if isinstance(prepared, np.ndarray | pa.RecordBatch):
            arrays = to_tree(prepared, to_numpy).values() if isinstance(prepared, pa.RecordBatch) else [prepared]
            return np.full(len(prepared), sum(math.prod(array.shape[1:]) for array in arrays), np.float64)
        return np.fromiter(map(_numbers_in, prepared), np.float64, len(prepared))

    def collate(self, prepared: Block) -> Batch:
        """Pad or stack the examples to tensors; ``inference_fn`` gets a list of tensors, one per example."""
        if self._inference_fn is not None:
            return Batch([_tensors_of(example) for example in prepared], len(prepared))
        if isinstance(prepared, pa.RecordBatch):
            columns = {name: self._padded(array) for name, array in to_tree(prepared, to_numpy).items()}
        elif not isinstance(prepared[0], dict):
            inputs, mask = self._padded(prepared)
            return Batch(([inputs], mask), len(prepared))
        else:
            columns = {name: self._padded([example[name] for example in prepared]) for name in prepared[0]}
        mask = next(iter(columns.values()))[1]
        return Batch(({name: inputs for name, (inputs, _) in columns.items()}, mask), len(prepared))

    def _padded(self, arrays: Sequence[Array]) -> tuple[Any, dict[str, Any]]:
        """Return a tensor of all examples, and the mask as a keyword argument of the model."""
        torch = require("torch", "torch")
        padded, lengths = pad_or_stack(arrays, self._pad_value, few=self._compile)
        padded = np.require(padded, requirements=["C", "W"])  # torch warns about read-only memory, such as a table's
        if self._mask is None:
            return torch.from_numpy(padded), {}
        if lengths is None:
            raise InvalidArgument(
                f"found examples that are single numbers, expected arrays with a length for mask={self._mask!r}",
                fix="leave mask= out",
            )
        mask = np.arange(padded.shape[1]) < lengths[:, np.newaxis]
        return torch.from_numpy(padded), {self._mask: torch.from_numpy(mask.astype(np.int64))}

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Call the module, or ``inference_fn``, and return its outputs."""
        inputs = map_tensors(self._in_dtype, batch.inputs)
        if self._inference_fn is not None:
            results = self._inference_fn(inputs, model, self.device, inference_args, self.model_id)
            return [result.inference for result in results]
        examples, mask = inputs
        if isinstance(examples, dict):
            outputs = model(**examples, **mask, **inference_args)
        else:
            outputs = model(*examples, **mask, **inference_args)
        return outputs if self._output == "torch" else map_tensors(_as_numpy_can, outputs)

    def _in_dtype(self, tensor: Any) -> Any:
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

    def collect(self, outputs: Outputs) -> Block:
        """Split the outputs into one value per example: numpy arrays, or tensors if ``output`` is "torch"."""
        values = outputs.values
        if self._output == "numpy":
            values = map_tensors(lambda tensor: tensor.numpy(force=True), values)
        return _split(values, outputs.batch.count, "the model's output")


def _is_ragged(block: Block) -> bool:
    """Return whether the lists of a column may differ in length."""
    if isinstance(block, pa.StructArray):
        block = pa.RecordBatch.from_struct_array(block)
    types = block.schema.types if isinstance(block, pa.RecordBatch) else [block.type]
    return any(pa.types.is_list(each) or pa.types.is_large_list(each) for each in types)


def _arrays_of(example: Any) -> Any:
    if isinstance(example, dict):
        return {name: _arrays_of(value) for name, value in cast("dict[str, Any]", example).items()}
    if hasattr(example, "detach"):  # a tensor on any device
        return _as_numpy_can(example).numpy(force=True)
    return np.asarray(example)


def _tensors_of(example: Any) -> Any:
    torch = require("torch", "torch")
    if isinstance(example, dict):
        return {name: torch.tensor(value) for name, value in cast("dict[str, Any]", example).items()}
    return torch.tensor(example)


def _numbers_in(example: Any) -> int:
    return sum(value.size for value in example.values()) if isinstance(example, dict) else example.size


def _as_numpy_can(tensor: Any) -> Any:
    return tensor.float() if tensor.dtype == require("torch", "torch").bfloat16 else tensor


def _split(values: Any, count: int, what: str) -> Block:
    """Split arrays, or dicts and tuples of arrays, into one value per example."""
    if isinstance(values, dict):
        names = list(cast("dict[str, Any]", values))
        columns = [_split(value, count, f"{what}[{name!r}]") for name, value in cast("dict[str, Any]", values).items()]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(values, tuple):
        columns = [_split(value, count, f"{what}[{i}]") for i, value in enumerate(cast("tuple[Any, ...]", values))]
        return list(zip(*columns, strict=True))
    if isinstance(values, list):
        each = cast("list[Any]", values)  # one value per example, as object detectors return them
        shape = (len(each),)
    else:
        each, shape = values, tuple(getattr(values, "shape", ()))
    if shape[:1] != (count,):
        raise HandlerError(
            f"{what} is a {type(values).__name__} of shape {shape}, expected {count} rows, one per example"
        )
    return each if isinstance(each, np.ndarray) else list(each)


@dataclass(frozen=True)
class ModuleFiles:
    """The class and files that a torch module is loaded from."""

    state_dict_path: str | None = None
    model_class: Callable[..., Any] | None = None
    model_params: dict[str, Any] = field(default_factory=dict[str, Any])
    torch_script_model_path: str | None = None
    exported_model_path: str | None = None
    load_model_args: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        given = [name for name in ("model_class", "torch_script_model_path", "exported_model_path") if self._has(name)]
        if len(given) != 1:
            raise InvalidArgument(
                f"found {' and '.join(given) or 'none of them'}, expected one of model_class, torch_script_model_path "
                "and exported_model_path"
            )
        if given != ["model_class"] and (self.state_dict_path or self.model_params):
            raise InvalidArgument(
                f"found {given[0]} with state_dict_path or model_params, which go with model_class",
                fix=f"leave them out: the file of {given[0]} holds the weights, too",
            )

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None

    @property
    def path(self) -> str | None:
        """The file that changes when there is a new version of the model."""
        return self.torch_script_model_path or self.exported_model_path or self.state_dict_path

    def at(self, path: str) -> ModuleFiles:
        """Return the same model, loaded from another file."""
        if self.torch_script_model_path:
            return replace(self, torch_script_model_path=path)
        if self.exported_model_path:
            return replace(self, exported_model_path=path)
        return replace(self, state_dict_path=path)

    def load(self, device: Any) -> Any:
        """Load the module onto its device, ready to predict."""
        torch = require("torch", "torch")
        if self.exported_model_path:
            # An exported graph has no training mode to switch off.
            return torch.export.load(local_copy(self.exported_model_path), **self.load_model_args).module().to(device)
        if self.torch_script_model_path:
            path = local_copy(self.torch_script_model_path)
            return torch.jit.load(path, map_location=device, **self.load_model_args).eval()
        assert self.model_class is not None
        module = self.model_class(**self.model_params)
        if self.state_dict_path:
            module.load_state_dict(self._weights(local_copy(self.state_dict_path)))
        return module.to(device).eval().requires_grad_(False)

    def _weights(self, path: str) -> dict[str, Any]:
        if path.endswith(".safetensors"):
            return require("safetensors.torch", "torch").load_file(path, **self.load_model_args)
        # A pickle can run code: only tensors are read, unless load_model_args say otherwise.
        arguments = {"map_location": "cpu", "weights_only": True, **self.load_model_args}
        return require("torch", "torch").load(path, **arguments)
