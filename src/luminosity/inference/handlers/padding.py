"""Examples of different lengths, padded to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from luminosity.inference.handlers.sizes import few_lengths

__all__ = ["Array", "pad_or_stack", "pad_rows"]

Array: TypeAlias = npt.NDArray[Any]


def pad_rows(values: Array, lengths: Array, width: int, value: Any, side: str = "right") -> tuple[Array, Array]:
    """Rows that stand one after the other in `values` as one array of this width, and where in it they are.

    >>> pad_rows(np.array([1, 2, 3]), np.array([2, 1]), 2, 0)[0].tolist()
    [[1, 2], [3, 0]]
    """
    places, lengths = np.arange(width), lengths[:, np.newaxis]
    mask = places < lengths if side == "right" else places >= width - lengths
    padded = np.full((*mask.shape, *values.shape[1:]), value, values.dtype)
    padded[mask] = values
    return padded, mask


def pad_or_stack(arrays: Sequence[Array] | Array, value: Any, few: bool = False) -> tuple[Array, Array | None]:
    """One array of all, and their lengths where they have one: arrays of one shape are stacked, others are padded
    at the end of their first dimension.

    >>> pad_or_stack([np.array([1, 2, 3]), np.array([4])], 0)
    (array([[1, 2, 3],
           [4, 0, 0]]), array([3, 1]))
    """
    if isinstance(arrays, np.ndarray):
        return arrays, np.full(len(arrays), arrays.shape[1], np.int64) if arrays.ndim > 1 else None
    shapes = {array.shape for array in arrays}
    if len({shape[1:] for shape in shapes}) > 1 or len({len(shape) for shape in shapes}) > 1:
        first, second, *_ = sorted(shapes, key=str)
        raise ValueError(
            f"examples of one batch have the shapes {first} and {second}: only the first dimension may differ, and "
            "is padded. Resize the examples before, with `with_preprocess_fn` for example."
        )
    if () in shapes:
        return np.stack(arrays), None
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    longest = int(lengths.max())
    longest = few_lengths(longest) if few and len(shapes) > 1 else longest
    if (lengths == longest).all():
        return np.stack(arrays), lengths
    padded, _ = pad_rows(np.concatenate(arrays), lengths, longest, value)
    return padded, lengths
