"""Beam's handlers for scikit-learn, ONNX and torch, called with whole columns instead of rows.

Beam's contract makes a list of rows for the model and a result object for each row, which takes a second for a million
rows. The handlers here pass one array in and one array out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from apache_beam.ml.inference.base import ModelHandler

from luminosity._shared.text import did_you_mean
from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.inference.adapting.wrapping import BeamContract, WrappedHandler
from luminosity.inference.blocks import Block, rows
from luminosity.inference.handlers.columns import from_tensor, to_columns, to_numpy, to_tree
from luminosity.inference.handlers.on_torch import map_tensors

__all__ = ["TensorExamplesHandler", "takes_names", "takes_tensors", "whole_columns"]

_Call: TypeAlias = Callable[[Any, Any, Any, dict[str, Any]], Any]
"""Computes predictions from the handler, its model, the inputs (an array or a dict of arrays) and inference_args."""

_ONNX_FLOATS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
_ONNX_INTEGERS = {f"tensor({name})": np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16")}

_BEAM = "apache_beam.ml.inference."


class ColumnarHandler(BeamContract):
    """A handler of Beam's that gets all examples of a batch as columns.

    Everything but the call of the model (its files, batch limits, metrics) is what the wrapped handler says.
    """

    columnar = True

    def __init__(self, handler: ModelHandler[Any, Any, Any], call: _Call, model_id: str | None) -> None:
        super().__init__(handler)
        self._call = call
        self._model_id = model_id

    @property
    def model_id(self) -> str | None:
        """The path of the model's file, or None if the wrapped handler has none."""
        return self._model_id

    def prepare(self, block: Block) -> Block:
        """Turn the examples into a record batch if they have several columns, otherwise into a numpy array."""
        columns = to_columns(block)
        return columns if isinstance(columns, pa.RecordBatch) else to_numpy(columns)

    def collate(self, prepared: Block) -> Any:
        """Turn a record batch into a dict of numpy arrays; leave an array unchanged."""
        return to_tree(prepared, to_numpy) if isinstance(prepared, pa.RecordBatch) else prepared

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        """Call the model with all columns of the batch at once."""
        return self._call(self._handler, model, batch, inference_args or {})

    def get_num_bytes(self, batch: Any) -> int:
        """Return the bytes of the batch's arrays."""
        arrays = batch.values() if isinstance(batch, dict) else [batch]
        return sum(array.nbytes for array in arrays)


class TensorExamplesHandler(WrappedHandler):
    """Turns the numbers and vectors of a table into the tensors that Beam's torch handlers expect as examples.

    Used for torch handlers that run the user's own inference function.
    """

    def collate(self, prepared: Block) -> Any:
        """Turn each example into tensors before the wrapped handler collates them."""
        return super().collate([_tensors(example) for example in rows(prepared)])

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        """Convert float tensors to the dtype of the weights, then run the wrapped handler's model."""
        return super().predict(model, _to_weights_dtype(model, batch), inference_args)


def _to_weights_dtype(model: Any, inputs: Any) -> Any:
    """Convert float tensors to the dtype of the weights: columns are often float64, and torch refuses to mix them."""
    weights = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
    return map_tensors(
        lambda tensor: tensor.to(weights) if weights is not None and tensor.is_floating_point() else tensor, inputs
    )


def _tensors(example: Any) -> Any:
    torch = require("torch", "torch")
    if isinstance(example, dict):
        return {name: torch.tensor(value) for name, value in example.items()}  # pyright: ignore[reportUnknownVariableType]
    return torch.tensor(example)


def _sklearn_numpy(handler: Any, model: Any, inputs: Any, inference_args: dict[str, Any]) -> Any:
    return model.predict(inputs, **inference_args)


def _sklearn_pandas(handler: Any, model: Any, inputs: Any, inference_args: dict[str, Any]) -> Any:
    return model.predict(require("pandas", "pandas").DataFrame(inputs))  # Beam's ignores inference_args, too


def _onnx_numpy(handler: Any, model: Any, inputs: Any, inference_args: dict[str, Any]) -> Any:
    expected = {each.name: each.type for each in model.get_inputs()}
    arrays = inputs if isinstance(inputs, dict) else {next(iter(expected)): inputs}
    for name in arrays:
        if name not in expected:
            raise InvalidArgument(
                f"found the input {name!r}, expected inputs of the model: {', '.join(map(repr, expected))}",
                fix=did_you_mean(name, expected) or None,
            )
    converted = {name: _for_onnx(array, expected[name], name) for name, array in arrays.items()}
    return model.run(None, {**converted, **inference_args})[0]


def _for_onnx(array: Any, kind: str, name: str) -> Any:
    """Convert numbers to the type of a model's input: ONNX Runtime refuses others, and columns often have 64 bits."""
    if kind in _ONNX_INTEGERS and array.dtype.kind in "iu":
        converted = array.astype(_ONNX_INTEGERS[kind], copy=False)
        if not np.array_equal(converted, array):
            raise InvalidArgument(f"found numbers beyond {_ONNX_INTEGERS[kind]}, expected by the input {name!r}")
        return converted
    return array.astype(_ONNX_FLOATS.get(kind, array.dtype), copy=False)


def _torch_tensor(handler: Any, model: Any, inputs: Any, inference_args: dict[str, Any]) -> Any:
    return _torch(handler, model, [inputs], {}, inference_args)


def _torch_keyed_tensor(handler: Any, model: Any, inputs: Any, inference_args: dict[str, Any]) -> Any:
    return _torch(handler, model, [], inputs, inference_args)


def _torch(handler: Any, model: Any, args: list[Any], kwargs: dict[str, Any], inference_args: dict[str, Any]) -> Any:
    torch = require("torch", "torch")
    device: Any = handler._device

    def tensor(array: Any) -> Any:
        values = torch.from_numpy(np.require(array, requirements=["C", "W"])).to(
            device
        )  # torch warns about read-only arrays
        return _to_weights_dtype(model, values)

    with torch.no_grad():
        outputs = model(*map(tensor, args), **{name: tensor(each) for name, each in kwargs.items()}, **inference_args)
    return _columns_of(outputs)


def _columns_of(outputs: Any) -> Block:
    """Return the model's output as columns. Models of transformers return several tensors by name."""
    if not isinstance(outputs, dict):
        return from_tensor(outputs)
    arrays = [to_columns(from_tensor(each)) for each in outputs.values()]
    return pa.RecordBatch.from_arrays(arrays, names=list(outputs))


@dataclass(frozen=True)
class _Kind:
    """A class of Beam's handlers, by name: it can't be imported if its library is not installed."""

    module: str
    name: str
    default_fn: str
    """Beam's own inference function; a handler with another one can't be called with columns."""
    fn_attribute: str
    path_attributes: tuple[str, ...]
    call: _Call
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
        _sklearn_numpy,
    ),
    _Kind(
        "sklearn_inference",
        "SklearnModelHandlerPandas",
        "_default_pandas_inference_fn",
        "_model_inference_fn",
        ("_model_uri",),
        _sklearn_pandas,
        takes_names=True,
    ),
    _Kind(
        "onnx_inference",
        "OnnxModelHandlerNumpy",
        "default_numpy_inference_fn",
        "_model_inference_fn",
        ("_model_uri",),
        _onnx_numpy,
    ),
    _Kind(
        "pytorch_inference",
        "PytorchModelHandlerTensor",
        "default_tensor_inference_fn",
        "_inference_fn",
        ("_torch_script_model_path", "_state_dict_path"),
        _torch_tensor,
    ),
    _Kind(
        "pytorch_inference",
        "PytorchModelHandlerKeyedTensor",
        "default_keyed_tensor_inference_fn",
        "_inference_fn",
        ("_torch_script_model_path", "_state_dict_path"),
        _torch_keyed_tensor,
        takes_names=True,
    ),
)


def whole_columns(handler: ModelHandler[Any, Any, Any]) -> ColumnarHandler | None:
    """Return a handler that calls the same model with whole columns, or None if ``handler`` can only take rows."""
    kind = _kind_of(handler)
    if kind is None:
        return None
    paths = (getattr(handler, name) for name in kind.path_attributes)
    return ColumnarHandler(handler, kind.call, next(filter(None, paths), None))


def takes_names(handler: ModelHandler[Any, Any, Any]) -> bool:
    """Return whether an example of ``handler`` is a dict or a data frame, so that columns keep their names."""
    kind = _kind_of(handler)
    return bool(getattr(handler, "takes_names", False)) if kind is None else kind.takes_names


def takes_tensors(handler: ModelHandler[Any, Any, Any]) -> bool:
    """Return whether ``handler`` is one of Beam's for torch, whichever inference function it has."""
    module: Any = sys.modules.get(_BEAM + "pytorch_inference")
    return module is not None and isinstance(
        handler, module.PytorchModelHandlerTensor | module.PytorchModelHandlerKeyedTensor
    )


def _kind_of(handler: ModelHandler[Any, Any, Any]) -> _Kind | None:
    return next((kind for kind in _KINDS if kind.fits(handler)), None)
