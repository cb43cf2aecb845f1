"""Beam's handlers of torch models that run code of the user's own: an example is a tensor, or a dict of tensors."""

from __future__ import annotations

from typing import Any

from luminosity.extras import require
from luminosity.inference.blocks import Block, rows
from luminosity.inference.handlers.on_torch import map_tensors
from luminosity.inference.wrapping import WrappedHandler

__all__ = ["OfTensors", "in_weights_type"]


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
