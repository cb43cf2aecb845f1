"""Which handlers of Beam's can be asked for whole columns."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from apache_beam.ml.inference.base import ModelHandler

from luminosity.inference.columnar import calls
from luminosity.inference.columnar.handler import Call, WholeColumns

__all__ = ["takes_names", "takes_tensors", "whole_columns"]

_BEAM = "apache_beam.ml.inference."


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
        calls.sklearn_numpy,
    ),
    _Kind(
        "sklearn_inference",
        "SklearnModelHandlerPandas",
        "_default_pandas_inference_fn",
        "_model_inference_fn",
        ("_model_uri",),
        calls.sklearn_pandas,
        takes_names=True,
    ),
    _Kind(
        "onnx_inference",
        "OnnxModelHandlerNumpy",
        "default_numpy_inference_fn",
        "_model_inference_fn",
        ("_model_uri",),
        calls.onnx_numpy,
    ),
    _Kind(
        "pytorch_inference",
        "PytorchModelHandlerTensor",
        "default_tensor_inference_fn",
        "_inference_fn",
        ("_torch_script_model_path", "_state_dict_path"),
        calls.torch_tensor,
    ),
    _Kind(
        "pytorch_inference",
        "PytorchModelHandlerKeyedTensor",
        "default_keyed_tensor_inference_fn",
        "_inference_fn",
        ("_torch_script_model_path", "_state_dict_path"),
        calls.torch_keyed_tensor,
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
