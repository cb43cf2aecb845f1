"""The Dense steps of sentence-transformers models."""

from __future__ import annotations

from typing import Any

from luminosity.extras import require
from luminosity.inference.handlers.pretrained import Pretrained

__all__ = ["dense_width", "load_dense"]


def dense_width(pretrained: Pretrained, folder: str) -> int:
    """The length of what the step in this folder makes."""
    return _config(pretrained, folder)["out_features"]


def load_dense(pretrained: Pretrained, folder: str) -> Any:
    """The step in this folder as a torch module, on the CPU."""
    torch = require("torch", "torch")
    config = _config(pretrained, folder)
    linear = torch.nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    linear.load_state_dict(
        {name.removeprefix("linear."): value for name, value in _weights(pretrained, folder).items()}
    )
    return torch.nn.Sequential(linear, _activation(config.get("activation_function", "torch.nn.Tanh")))


def _config(pretrained: Pretrained, folder: str) -> dict[str, Any]:
    config = pretrained.json(f"{folder}/config.json")
    if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise ValueError(
            f"{pretrained.path!r} has in {folder} a Dense step that is residual, or not over the embedding"
        )
    return config


def _weights(pretrained: Pretrained, folder: str) -> dict[str, Any]:
    path = pretrained.file(f"{folder}/model.safetensors")
    if path is not None:
        return require("safetensors.torch", "transformers").load_file(path)
    path = pretrained.file(f"{folder}/pytorch_model.bin")
    return require("torch", "torch").load(path, map_location="cpu", weights_only=True)


def _activation(name: str) -> Any:
    """The torch module of this name; nothing else is run because a model's file says so."""
    torch = require("torch", "torch")
    module, _, kind = name.rpartition(".")
    found = getattr(require(module, "torch"), kind, None) if module.startswith("torch.nn") else None
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise ValueError(f"a Dense step has the activation {name!r}, expected a module of torch.nn")
    return found()
