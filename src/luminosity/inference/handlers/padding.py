"""Examples of different lengths, padded to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "few_lengths", "pad_or_stack"]

Array = npt.NDArray[Any]

_STEP = 64


def few_lengths(length: int) -> int:
    """The length up to which a batch is padded so that few lengths occur: compiled code is made for each.

    >>> few_lengths(5), few_lengths(33), few_lengths(65)
    (8, 64, 128)
    """
    return 1 << (length - 1).bit_length() if 0 < length <= _STEP else -(-length // _STEP) * _STEP


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
    joined = np.concatenate(arrays)
    padded = np.full((len(arrays), longest, *joined.shape[1:]), value, joined.dtype)
    padded[np.arange(longest) < lengths[:, np.newaxis]] = joined
    return padded, lengths
