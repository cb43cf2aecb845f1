"""Whether a handler's model runs packed, and the model that does: token ids in, a vector for each row out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from luminosity.core import InferenceMetrics
from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.inference.handler import note
from luminosity.inference.handlers.text.packed.families import Unfit, shape_of
from luminosity.inference.handlers.text.packed.weights import Weights

__all__ = [
    "ModelFiles",
    "PackedEmbedder",
    "Packing",
    "check_int8",
    "config_of",
    "int8_packing_of",
    "packing_of",
    "type_of",
]
_LOGGER = logging.getLogger(__name__)

_FILE_ARGUMENTS = {"cache_dir", "local_files_only", "revision", "subfolder", "token"}
"""Loading arguments that only say where the files are; all others are for transformers."""


class ModelFiles(Protocol):
    """The files of a model."""

    @property
    def path(self) -> str: ...

    @property
    def arguments(self) -> Mapping[str, Any]: ...

    def json(self, name: str) -> Any: ...

    def file(self, name: str) -> str | None: ...


@dataclass(frozen=True)
class Packing:
    """How a model runs packed."""

    weights: Weights
    device: Any
    dtype: Any
    is_free: bool
    """Whether no row is padded: a batch then costs the sum of its rows' tokens, whatever their lengths."""

    is_int8: bool = False
    """Whether ONNX Runtime computes the model in 8 bits."""

    def encoder(self) -> Any:
        """Load the weights onto the device."""
        if self.is_int8:
            from luminosity.inference.handlers.text.packed.int8 import int8_encoder_of  # imports torch

            return int8_encoder_of(self.weights)
        return _choice().encoder_of(self.weights.shape, *self.weights.load(self.device, self.dtype))


def packing_of(files: ModelFiles, device: Any, dtype: Any) -> Packing | None:
    """Return how a model runs packed, or None if it needs transformers; a line of the log says why.

    ``dtype``: the type of the weights, or None for the one that the model was saved with.
    """
    try:
        return _packing_of(files, device, dtype)
    except Unfit as error:
        _LOGGER.info("The model runs in transformers, padded: %s.", error)
        return None


def int8_packing_of(files: ModelFiles) -> Packing:
    """Return how a model runs in 8 bits on the CPU. Raises ``InvalidArgument`` if it can't."""
    torch = require("torch", "torch")
    return Packing(check_int8(files), torch.device("cpu"), torch.float32, is_free=False, is_int8=True)


def check_int8(files: ModelFiles) -> Weights:
    """Return the weights of a model that can run in 8 bits. Raises ``InvalidArgument`` if it can't."""
    try:
        weights, _ = _weights_of(files)
        if weights.shape.is_rotary:
            raise Unfit("its positions are rotated")
    except Unfit as error:
        raise InvalidArgument(
            f"found precision='int8' for {files.path!r}, but {error}; expected BERT, MiniLM, DistilBERT, MPNet, "
            "RoBERTa or XLM-RoBERTa, with its weights in model.safetensors",
            fix="leave out precision",
        ) from error
    return weights


def config_of(files: ModelFiles) -> Mapping[str, Any]:
    """Return the content of ``config.json``. Raises ``Unfit`` for files that only transformers can load."""
    others = sorted(files.arguments.keys() - _FILE_ARGUMENTS)
    if others:
        raise Unfit(f"{others[0]} is an argument of transformers")
    config = files.json("config.json")
    if config is None:
        raise Unfit("it has no config.json")
    if files.file("adapter_config.json") is not None:
        raise Unfit("it has adapters")
    return config


def type_of(config: Mapping[str, Any], saved: str, device: Any, dtype: Any) -> Any:
    """Return the type of a model's numbers on a device. Raises ``Unfit`` for one that only transformers computes.

    Args:
        config: the content of ``config.json``.
        saved: the type in which the weights are saved.
        device: where the model runs.
        dtype: the type that the user wants; None for the one that the model was saved with.
    """
    torch = require("torch", "torch")
    if device.type not in ("cpu", "cuda"):
        raise Unfit(f"its device is {device.type}")
    if dtype is None:
        dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or saved))
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise Unfit(f"its type is {dtype}")
    if device.type == "cpu" and dtype != torch.float32:
        raise Unfit(f"its type is {dtype} on the CPU")
    return dtype


def _packing_of(files: ModelFiles, device: Any, dtype: Any) -> Packing:
    weights, config = _weights_of(files)
    dtype = type_of(config, weights.dtype, device, dtype)
    return Packing(weights, device, dtype, _choice().attends_without_padding(weights.shape, device, dtype))


def _weights_of(files: ModelFiles) -> tuple[Weights, Mapping[str, Any]]:
    """Return the weights and the content of ``config.json``."""
    config = config_of(files)
    shape = shape_of(config)
    path = files.file("model.safetensors")
    if path is None:
        raise Unfit("it has no model.safetensors")
    return Weights.of(path, shape), config


def _choice() -> Any:
    """Return the module that chooses. It imports torch, which the processes that only tokenise don't need."""
    from luminosity.inference.handlers.text.packed import choice

    return choice


class PackedEmbedder:
    """An encoder with pooling and the steps after it, for rows of token ids.

    ``finish`` takes the pooled vectors; ``steps`` are its modules.
    """

    def __init__(
        self, packing: Packing, modes: Sequence[str], steps: Sequence[Any], finish: Callable[[Any], Any]
    ) -> None:
        self._modes = tuple(modes)
        self._steps = steps
        self._finish = finish
        self.encoder = packing.encoder()
        from luminosity.inference.handlers.text.packed.encoder import Rows, pool_rows  # imports torch

        self._rows, self._pool = Rows, pool_rows

    def parameters(self) -> Iterator[Any]:
        """Yield all tensors of the model."""
        yield from self.encoder.parameters()
        for step in self._steps:
            yield from step.parameters()

    def buffers(self) -> Iterator[Any]:
        """Yield the buffers of the steps."""
        for step in self._steps:
            yield from step.buffers()

    def __call__(self, inputs: Mapping[str, Any], longest: int) -> Any:
        """Return the vectors of the rows, on the device. ``inputs`` has the ids, and where rows start."""
        ids, starts = inputs["ids"], inputs["starts"]
        encoder, rows = self.encoder, self._rows.of(starts, len(ids), longest)
        for counter in (InferenceMetrics.PACKED, encoder.counter):
            note(counter, starts.shape[0] - 1)
        states = encoder.states(ids, encoder.positions(ids, rows), rows)
        return self._finish(self._pool(states, rows, self._modes, encoder.mean))
