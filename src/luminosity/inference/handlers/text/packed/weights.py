"""The weights of a packed encoder, from ``model.safetensors``: names, sizes and types are known before any is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from luminosity.extras import require
from luminosity.inference.handlers.text.packed.families import Shape, Unfit

__all__ = ["Weights", "header_of"]

_MOST_HEADER_BYTES = 100_000_000  # as the format allows
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_IGNORED = ("pooler.", "embeddings.position_ids")
"""Tensors of an encoder that its vectors of tokens do not depend on."""
Header = Mapping[str, tuple[str, tuple[int, ...]]]
"""The type and the sizes of each tensor of a file."""


def header_of(path: str) -> Header:
    """Return what a file of safetensors says about its tensors, without reading them."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MOST_HEADER_BYTES:
            raise Unfit(f"{path} is no file of safetensors")
        try:
            found = json.loads(file.read(size))
            return {
                name: (str(each["dtype"]), tuple(each["shape"]))
                for name, each in found.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError) as error:
            raise Unfit(f"{path} is no file of safetensors") from error


@dataclass(frozen=True)
class Weights:
    """The tensors of a file that an encoder of this shape consists of."""

    path: str
    shape: Shape
    prefix: str
    dtype: str
    """The type in which the tensors are saved."""

    @classmethod
    def of(cls, path: str, shape: Shape) -> Weights:
        """Raises ``Unfit`` unless the file has exactly the tensors that the shape needs."""
        header, names = header_of(path), shape.names
        prefix = names.prefix if f"{names.prefix}{names.words}.weight" in header else ""
        needed = {f"{prefix}{name}": sizes for name, sizes in _sizes(shape)}
        for name, sizes in needed.items():
            if name not in header:
                raise Unfit(f"the file has no tensor {name!r}")
            if header[name][1] != sizes:
                raise Unfit(f"the tensor {name!r} has the sizes {header[name][1]}, not {sizes}")
        for name in header.keys() - needed.keys():
            if name.startswith(prefix) and not name.removeprefix(prefix).startswith(_IGNORED):
                raise Unfit(f"the file has the tensor {name!r}, which is not known")
        types = {header[name][0] for name in needed}
        if len(types) != 1 or not types <= _DTYPES.keys():
            raise Unfit(f"the tensors have the types {', '.join(sorted(types))}")
        return cls(path, shape, prefix, _DTYPES[types.pop()])

    @property
    def bytes_of_one(self) -> int:
        """The number of bytes of a number in the file."""
        return 4 if self.dtype == "float32" else 2

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, as they are saved."""
        return self.bytes_of_one * sum(math.prod(sizes) for _, sizes in _sizes(self.shape))

    def load(self, device: Any, dtype: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the tensors outside of layers and those of each layer, on a device and of one type."""
        torch = require("torch", "torch")
        names = self.shape.names
        with require("safetensors", "transformers").safe_open(self.path, "pt", device="cpu") as file:

            def read(*parts: str) -> Any:
                tensors = [file.get_tensor(self.prefix + part).to(device=device, dtype=dtype) for part in parts]
                return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

            common = {"words": read(f"{names.words}.weight"), "norm.weight": read(f"{names.norm}.weight")}
            optional = {"positions": names.positions, "types": names.types, "last_norm": names.last_norm}
            for ours, theirs in {**optional, "distances": names.distances}.items():
                if theirs:
                    common[ours] = read(f"{theirs}.weight")
            if names.has_bias:
                common["norm.bias"] = read(f"{names.norm}.bias")
            layers: list[dict[str, Any]] = []
            for number in range(self.shape.layers):
                before = names.layer.format(number)
                layers.append(
                    {
                        f"{ours}.{kind}": read(*(f"{before}{part}.{kind}" for part in parts))
                        for ours, parts in _parts(self.shape, number)
                        for kind in _kinds(self.shape)
                    }
                )
        return common, layers


def _kinds(shape: Shape) -> tuple[str, ...]:
    return ("weight", "bias") if shape.names.has_bias else ("weight",)


def _parts(shape: Shape, number: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the parts of a layer; the first of ModernBERT is not normalised again."""
    for ours, parts in shape.names.parts.items():
        if not (shape.is_rotary and number == 0 and ours == "norm"):
            yield ours, parts


def _sizes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name of each tensor that an encoder needs, without the prefix, and its sizes."""
    names, width, inside = shape.names, shape.width, shape.inside
    up = 2 * inside if shape.is_rotary else inside
    outputs = {"joined": 3 * width, "out": width, "norm": 0, "up": up, "down": width, "last": 0}
    inputs = {"down": inside}
    yield f"{names.words}.weight", (shape.vocabulary, width)
    yield f"{names.norm}.weight", (width,)
    if names.has_bias:
        yield f"{names.norm}.bias", (width,)
    if names.positions:
        yield f"{names.positions}.weight", (shape.positions, width)
    if names.types:
        yield f"{names.types}.weight", (shape.types, width)
    if names.distances:
        yield f"{names.distances}.weight", (32, shape.heads)
    if names.last_norm:
        yield f"{names.last_norm}.weight", (width,)
    for number in range(shape.layers):
        before = names.layer.format(number)
        for ours, parts in _parts(shape, number):
            for part in parts:
                rows = outputs[ours] // len(parts) or width
                sizes = (rows, inputs.get(ours, width)) if outputs[ours] else (width,)
                yield f"{before}{part}.weight", sizes
                if names.has_bias:
                    yield f"{before}{part}.bias", (rows,)
