"""The weights of a language model, from ``model.safetensors`` or its parts: checked before any is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from luminosity.extras import require
from luminosity.inference.handlers.text.packed.families import Unfit
from luminosity.inference.handlers.text.packed.packing import ModelFiles, config_of
from luminosity.inference.handlers.text.packed.weights import header_of
from luminosity.inference.handlers.text.slots.families import DecoderShape, decoder_shape_of

__all__ = ["DecoderWeights", "ModelFiles"]

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_IGNORED = "rotary_emb.inv_freq"  # older files have the angles, too, which follow from the configuration


@dataclass(frozen=True)
class DecoderWeights:
    """Where each tensor of a model lies."""

    shape: DecoderShape
    paths: Mapping[str, str]
    """The file of each tensor."""
    dtype: str
    """The type in which the tensors are saved."""
    config: Mapping[str, Any]
    """The content of ``config.json``."""

    @classmethod
    def of(cls, files: ModelFiles) -> DecoderWeights:
        """Raises ``Unfit`` unless the files have exactly the tensors that the shape needs."""
        config = config_of(files)
        shape = decoder_shape_of(config)
        found: dict[str, tuple[str, tuple[str, tuple[int, ...]]]] = {}
        for path in _paths(files):
            found |= {name: (path, each) for name, each in header_of(path).items()}
        needed = dict(shape.tensors())
        for name, sizes in needed.items():
            if name not in found:
                raise Unfit(f"the files have no tensor {name!r}")
            if found[name][1][1] != sizes:
                raise Unfit(f"the tensor {name!r} has the sizes {found[name][1][1]}, not {sizes}")
        for name in found.keys() - needed.keys():
            if not (name.endswith(_IGNORED) or (name == "lm_head.weight" and shape.is_tied)):
                raise Unfit(f"the files have the tensor {name!r}, which is not known")
        types = {found[name][1][0] for name in needed}
        if len(types) != 1 or not types <= _DTYPES.keys():
            raise Unfit(f"the tensors have the types {', '.join(sorted(types))}")
        return cls(shape, {name: found[name][0] for name in needed}, _DTYPES[types.pop()], config)

    @property
    def numbers(self) -> int:
        """How many numbers all tensors have."""
        return sum(math.prod(sizes) for _, sizes in self.shape.tensors())

    def load(self, device: Any, dtype: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the tensors outside of layers and those of each layer, on a device and of one type."""
        torch, safe_open = require("torch", "torch"), require("safetensors", "transformers").safe_open
        opened = {path: safe_open(path, "pt", device="cpu") for path in sorted(set(self.paths.values()))}

        def read(name: str) -> Any:
            return opened[self.paths[name]].get_tensor(name).to(device=device, dtype=dtype)

        common = {"words": read("model.embed_tokens.weight"), "norm": read("model.norm.weight")}
        common["head"] = common["words"] if self.shape.is_tied else read("lm_head.weight")
        layers: list[dict[str, Any]] = []
        for number in range(self.shape.layers):
            layer: dict[str, Any] = {}
            for ours, parts in self.shape.parts(number).items():
                tensors = [read(name) for name, _ in parts]
                layer[ours] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            layers.append(layer)
        return common, layers


def _paths(files: ModelFiles) -> list[str]:
    """Return the local paths of the files with the tensors."""
    whole = files.file("model.safetensors")
    if whole is not None:
        return [whole]
    index = files.json("model.safetensors.index.json")
    if index is None:
        raise Unfit("it has no model.safetensors")
    names: Mapping[str, str] = index.get("weight_map") or {}
    paths = [files.file(name) for name in sorted(set(names.values()))]
    if not paths or None in paths:
        raise Unfit("a part of its weights is missing")
    return [path for path in paths if path is not None]
