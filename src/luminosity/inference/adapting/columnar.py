"""A handler of Beam's, asked for all examples at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from apache_beam.ml.inference.base import ModelHandler

from luminosity.extras import require
from luminosity.inference.adapting.wrapping import BeamContract, WrappedHandler
from luminosity.inference.blocks import Block, rows
from luminosity.inference.handlers.columns import from_tensor, to_columns, to_numpy, to_tree
from luminosity.inference.handlers.on_torch import map_tensors

__all__ = [
    "Call",
    "OfTensors",
    "WholeColumns",
    "in_weights_type",
    "onnx_numpy",
    "sklearn_numpy",
    "sklearn_pandas",
    "takes_names",
    "takes_tensors",
    "torch_keyed_tensor",
    "torch_tensor",
    "whole_columns",
]


Call: TypeAlias = Callable[[Any, Any, Any, dict[str, Any]], Any]
"""What is computed: of the handler, its model, the inputs (an array, or a dict of arrays) and the inference_args."""


_ONNX_FLOATS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}

_BEAM = "apache_beam.ml.inference."


class WholeColumns(BeamContract):
    """Beam's contract makes a list of rows for the model and a result object for each: a second for a million rows.

    Everything else, from the files of the model to the limits of batches, is as the handler says.
    """

    columnar = True

    def __init__(self, handler: ModelHandler[Any, Any, Any], call: Call, model_id: str | None) -> None:
        super().__init__(handler)
        self._call = call
        self._model_id = model_id

    @property
    def model_id(self) -> str | None:
        return self._model_id

    def prepare(self, block: Block) -> Block:
        columns = to_columns(block)
        return columns if isinstance(columns, pa.RecordBatch) else to_numpy(columns)

    def collate(self, prepared: Block) -> Any:
        return to_tree(prepared, to_numpy) if isinstance(prepared, pa.RecordBatch) else prepared

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return self._call(self._handler, model, batch, inference_args or {})

    def get_num_bytes(self, batch: Any) -> int:
        arrays = batch.values() if isinstance(batch, dict) else [batch]
        return sum(array.nbytes for array in arrays)


class OfTensors(WrappedHandler):
    """A table has numbers and vectors; nobody can make tensors of them before."""

    def collate(self, prepared: Block) -> Any:
        return super().collate([_tensors(example) for example in rows(prepared)])

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return super().predict(model, in_weights_type(model, batch), inference_args)


def in_weights_type(model: Any, inputs: Any) -> Any:
    """Columns are most often of 64 bits and weights of 32: torch would refuse to mix them."""
    weights = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
    return map_tensors(
        lambda tensor: tensor.to(weights) if weights is not None and tensor.is_floating_point() else tensor, inputs
    )


def _tensors(example: Any) -> Any:
    torch = require("torch", "torch")
    if isinstance(example, dict):
        return {name: torch.tensor(value) for name, value in example.items()}  # pyright: ignore[reportUnknownVariableType]
    return torch.tensor(example)


def sklearn_numpy(handler: Any, model: Any, inputs: Any, inference_args: dict[str, Any]) -> Any:
    return model.predict(inputs, **inference_args)


def sklearn_pandas(handler: Any, model: Any, inputs: Any, inference_args: dict[str, Any]) -> Any:
    return model.predict(require("pandas", "pandas").DataFrame(inputs))  # As Beam's: the inference_args are not used.


def onnx_numpy(handler: Any, model: Any, inputs: Any, inference_args: dict[str, Any]) -> Any:
    expected = model.get_inputs()[0]
    inputs = inputs.astype(_ONNX_FLOATS.get(expected.type, inputs.dtype), copy=False)
    return model.run(None, {expected.name: inputs, **inference_args})[0]


def torch_tensor(handler: Any, model: Any, inputs: Any, inference_args: dict[str, Any]) -> Any:
    return _torch(handler, model, [inputs], {}, inference_args)


def torch_keyed_tensor(handler: Any, model: Any, inputs: Any, inference_args: dict[str, Any]) -> Any:
    return _torch(handler, model, [], inputs, inference_args)


def _torch(handler: Any, model: Any, args: list[Any], kwargs: dict[str, Any], inference_args: dict[str, Any]) -> Any:
    torch = require("torch", "torch")
    device: Any = handler._device

    def tensor(array: Any) -> Any:
        values = torch.from_numpy(np.require(array, requirements=["C", "W"])).to(device)  # else torch warns
        return in_weights_type(model, values)

    with torch.no_grad():
        outputs = model(*map(tensor, args), **{name: tensor(each) for name, each in kwargs.items()}, **inference_args)
    return _columns_of(outputs)


def _columns_of(outputs: Any) -> Block:
    """Models of transformers, and others, return several tensors by name."""
    if not isinstance(outputs, dict):
        return from_tensor(outputs)
    arrays = [to_columns(from_tensor(each)) for each in outputs.values()]
    return pa.RecordBatch.from_arrays(arrays, names=list(outputs))


@dataclass(frozen=True)
class _Kind:
    """A class of Beam's, by name: that of a library which is not installed can't be imported."""

    module: str
    name: str
    default_fn: str
    """What runs the model unless the user has said otherwise; only that one is known to be replaceable."""
    fn_attribute: str
    path_attributes: tuple[str, ...]
    call: Call
    takes_names: bool = False

    def fits(self, handler: Any) -> bool:
        module = sys.modules.get(_BEAM + self.module)
        kind = getattr(module, self.name, None)
        return (
            kind is not None
            and isinstance(handler, kind)
            and type(handler).run_inference is kind.run_inference
            and getattr(handler, self.fn_attribute) is getattr(module, self.default_fn)
        )


_KINDS = (
    _Kind(
        "sklearn_inference",
        "SklearnModelHandlerNumpy",
        "_default_numpy_inference_fn",
        "_model_inference_fn",
        ("_model_uri",),
        sklearn_numpy,
    ),
    _Kind(
        "sklearn_inference",
        "SklearnModelHandlerPandas",
        "_default_pandas_inference_fn",
        "_model_inference_fn",
        ("_model_uri",),
        sklearn_pandas,
        takes_names=True,
    ),
    _Kind(
        "onnx_inference",
        "OnnxModelHandlerNumpy",
        "default_numpy_inference_fn",
        "_model_inference_fn",
        ("_model_uri",),
        onnx_numpy,
    ),
    _Kind(
        "pytorch_inference",
        "PytorchModelHandlerTensor",
        "default_tensor_inference_fn",
        "_inference_fn",
        ("_torch_script_model_path", "_state_dict_path"),
        torch_tensor,
    ),
    _Kind(
        "pytorch_inference",
        "PytorchModelHandlerKeyedTensor",
        "default_keyed_tensor_inference_fn",
        "_inference_fn",
        ("_torch_script_model_path", "_state_dict_path"),
        torch_keyed_tensor,
        takes_names=True,
    ),
)


def whole_columns(handler: ModelHandler[Any, Any, Any]) -> WholeColumns | None:
    """The handler for whole columns; None where it is known for rows alone."""
    kind = _kind_of(handler)
    if kind is None:
        return None
    paths = (getattr(handler, name) for name in kind.path_attributes)
    return WholeColumns(handler, kind.call, next(filter(None, paths), None))


def takes_names(handler: ModelHandler[Any, Any, Any]) -> bool:
    """Whether an example is a dict or a frame: several columns keep their names."""
    kind = _kind_of(handler)
    return kind is not None and kind.takes_names


def takes_tensors(handler: ModelHandler[Any, Any, Any]) -> bool:
    """Whether it is one of Beam's for torch, whatever runs the model."""
    module: Any = sys.modules.get(_BEAM + "pytorch_inference")
    return module is not None and isinstance(
        handler, module.PytorchModelHandlerTensor | module.PytorchModelHandlerKeyedTensor
    )


def _kind_of(handler: ModelHandler[Any, Any, Any]) -> _Kind | None:
    return next((kind for kind in _KINDS if kind.fits(handler)), None)
