"""How models of Beam's own handlers are called with whole columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from luminosity.extras import require
from luminosity.inference.blocks import Block
from luminosity.inference.columnar.tensors import in_weights_type
from luminosity.inference.handlers.columns import to_columns
from luminosity.inference.handlers.plain import from_tensor

__all__ = ["onnx_numpy", "sklearn_numpy", "sklearn_pandas", "torch_keyed_tensor", "torch_tensor"]

_ONNX_FLOATS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}


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
