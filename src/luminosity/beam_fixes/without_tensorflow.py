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
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

__all__ = ["install"]

_MODULE = "apache_beam.ml.inference.huggingface_inference"
# Imported before the stand-ins are there: libraries look for TensorFlow while they are imported.
_FIRST = ("torch", "transformers", "apache_beam.ml.inference.pytorch_inference")
_LAZY = ("AutoModel", "Pipeline", "pipeline")  # of transformers, which imports their modules when they are used
_FIX = "pip install tensorflow, and a version of transformers that supports it (before 5)"


def install() -> None:
    """Let the import system know about that module. The module itself is imported when somebody asks for it."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]  # importlib.abc would cost each start 3 ms


class _Finder:
    """Finds that one module where Python finds it, and gives it another loader if something is missing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)  # pyright: ignore[reportAttributeAccessIssue]
                return spec
        return None


class _Loader:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
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
            self._inner.exec_module(module)
        finally:
            if lacks_tensorflow:
                del sys.modules["tensorflow"]
            if lacks_class:
                del transformers.TFAutoModel  # type: ignore[attr-defined]
        _count_bytes_of_tensors(module)

    def __getattr__(self, name: str) -> Any:  # get_source() and the like, for tracebacks
        return getattr(self._inner, name)


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
