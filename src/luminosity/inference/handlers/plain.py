"""What models return, as numpy and Arrow can take it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

__all__ = ["from_tensor", "plain"]


def from_tensor(tensor: Any) -> Any:
    """A tensor of torch, of whatever device and type, as an array. Numpy has no bfloat16."""
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy(force=True)


def plain(value: Any) -> Any:
    """The same, with numbers and vectors that Arrow knows in place of tensors, matrices and bfloat16.

    >>> plain({"scores": np.ones((1, 2), np.float32), "label": "good"})
    {'scores': [array([1., 1.], dtype=float32)], 'label': 'good'}
    """
    if isinstance(value, dict):
        return {name: plain(each) for name, each in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        branches = [plain(each) for each in cast("list[Any]", value)]
        return branches if isinstance(value, list) else tuple(branches)
    if hasattr(value, "detach"):
        return plain(from_tensor(value))
    if not isinstance(value, np.ndarray | np.generic):
        return value
    array: Any = value.astype(np.float32) if value.dtype.kind == "V" else value
    if array.ndim > 1:
        return [plain(each) for each in array]
    return array if array.ndim else array[()]
