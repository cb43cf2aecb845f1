"""The base class of handlers for models of transformers, of texts or of images: their files, device and attention."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from apache_beam.ml.inference.base import PredictionResult
from typing_extensions import Unpack

from luminosity.extras import require
from luminosity.inference.handler import ExampleT, HandlerOptions
from luminosity.inference.handlers.on_torch import TorchHandler
from luminosity.inference.handlers.text.pretrained import Pretrained

__all__ = ["TransformersHandler"]


class TransformersHandler(TorchHandler[ExampleT, PredictionResult]):
    """A handler whose model is a folder of transformers, or a name on the Hugging Face hub."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: str,
        dtype: Any,
        compile: bool,
        load_model_args: Mapping[str, Any] | None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(device, dtype, **options)
        self._pretrained = Pretrained(os.fspath(path), dict(load_model_args or {}))
        self._compile = compile

    @property
    def model_id(self) -> str | None:
        """The folder of the model, or its name on the hub."""
        return self._pretrained.path

    @property
    def source(self) -> Pretrained:
        """The location of the transformer and of the files beside it."""
        return self._pretrained

    @cached_property
    def config(self) -> Any:
        """The model's configuration, read on first use."""
        return self.source.config()

    def check_files(self) -> None:
        """Raise if the model is neither a folder here, nor in the hub's cache, nor on the hub."""
        self._pretrained.check()

    def update_model_path(self, model_path: str | None = None) -> None:
        """Switch to another version of the model."""
        if model_path:
            self._pretrained = Pretrained(model_path, self._pretrained.arguments)
            self.forget()

    def choose_attention(self) -> None:
        """Leave out cuDNN's attention: it plans each new shape, which takes longer than a batch, and most are new."""
        if self.device.type == "cuda":
            require("torch", "torch").backends.cuda.enable_cudnn_sdp(False)

    def on_device(self, kind: str, optional: tuple[str, ...] = ()) -> Any:
        """Return the model of this kind on its device."""
        model = self.source.model(kind, self.dtype, optional)
        # With a device map, the model is on its devices already.
        return model if "device_map" in self.source.arguments else model.to(self.device)

    def compiled(self, module: Any) -> Any:
        """Return the module, compiled if the user asked for that."""
        return require("torch", "torch").compile(module, dynamic=True) if self._compile else module
