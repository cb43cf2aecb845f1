"""Lets Beam's Hugging Face handlers be imported without TensorFlow.

``apache_beam.ml.inference.huggingface_inference`` imports ``tensorflow`` and ``transformers.TFAutoModel`` at its top,
for the half of its code that runs TensorFlow's models. The other half needs only torch. Current versions of
transformers have no ``TFAutoModel`` at all, so not even an installed TensorFlow helps.

While that one module is imported, and only then, stand-ins take the place of what is missing. Nothing else sees them:
``import tensorflow`` still fails, and what is installed is used as it is. A stand-in has no values: whatever needs
TensorFlow raises :class:`~luminosity.errors.MissingExtra`.

One method is replaced, because no batch of torch's tensors gets past it: ``HuggingFaceModelHandlerTensor`` counts bytes
as if each tensor were a dict of tensors, and raises.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MODULE", "run"]

MODULE = "apache_beam.ml.inference.huggingface_inference"
# Imported before the stand-ins are there: libraries look for TensorFlow while they are imported.
_FIRST = ("torch", "transformers", "apache_beam.ml.inference.pytorch_inference")
_LAZY = ("AutoModel", "Pipeline", "pipeline")  # of transformers, which imports their modules when they are used
_FIX = "pip install tensorflow, and a version of transformers that supports it (before 5)"


def run(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    """Run that one module, with stand-ins for what is missing."""
    for name in _FIRST:
        importlib.import_module(name)
    for name in _LAZY:
        getattr(sys.modules["transformers"], name)
    transformers = sys.modules["transformers"]  # only now: it may replace itself when a name is used
    lacks_tensorflow = not _is_installed("tensorflow")
    lacks_class = not hasattr(transformers, "TFAutoModel")
    if lacks_tensorflow:
        sys.modules["tensorflow"] = _MissingTensorFlow("tensorflow")
    if lacks_class:
        transformers.TFAutoModel = _MissingModel  # type: ignore[attr-defined]
    try:
        execute(module)
    finally:
        if lacks_tensorflow:
            del sys.modules["tensorflow"]
        if lacks_class:
            del transformers.TFAutoModel  # type: ignore[attr-defined]
    _count_bytes_of_tensors(module)


def _count_bytes_of_tensors(module: Any) -> None:
    handler = module.HuggingFaceModelHandlerTensor
    original = handler.get_num_bytes

    def get_num_bytes(self: Any, batch: Sequence[Any]) -> int:
        if all(isinstance(each, module.torch.Tensor) for each in batch):
            return sum(each.element_size() * each.numel() for each in batch)
        return original(self, batch)

    handler.get_num_bytes = get_num_bytes


def _is_installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise  # TensorFlow is there, and broken: its own error says more than a stand-in
        return False
    return True


class _Tensor:
    """The type of TensorFlow's tensors, of which there are none."""


class _MissingTensorFlow(ModuleType):
    Tensor = _Tensor

    def __getattr__(self, name: str) -> Any:
        from luminosity.errors import MissingExtra

        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingExtra("tensorflow is not installed", fix=_FIX, name="tensorflow")


class _MissingModel:
    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> Any:
        from luminosity.errors import MissingExtra

        raise MissingExtra("found TFAutoModel, a model of TensorFlow, which is not installed", fix=_FIX)
