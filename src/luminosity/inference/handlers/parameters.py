"""Parameters from a file, without pickles: a file from a stranger can't run code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from luminosity.extras import require
from luminosity.inference.files.local import local_copy

__all__ = ["load_parameters"]

# By the names in a file. numpy alone knows neither the narrow ones nor, therefore, does safetensors' loader for it.
_TYPES = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def load_parameters(path: str) -> dict[str, Any]:
    """The arrays of an `.npz` or `.safetensors` file, by their names."""
    if path.endswith(".npz"):
        with np.load(local_copy(path), allow_pickle=False) as arrays:
            return dict(arrays)
    if path.endswith(".safetensors"):
        return _safetensors(Path(local_copy(path)).read_bytes(), path)
    raise ValueError(f"found the path {path!r}, expected one that ends in .npz or .safetensors")


def _safetensors(content: bytes, path: str) -> dict[str, Any]:
    dtype = require("jax.numpy", "jax").dtype
    arrays: dict[str, Any] = {}
    for name, array in require("safetensors", "jax").deserialize(content):
        if array["dtype"] not in _TYPES:
            raise ValueError(
                f"found an array of type {array['dtype']} in {path!r}, expected one of {', '.join(_TYPES)}"
            )
        arrays[name] = np.frombuffer(array["data"], dtype(_TYPES[array["dtype"]])).reshape(array["shape"])
    return arrays
