"""Padding: one array for examples of different lengths, and few different sizes for compiled models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from luminosity.errors import InvalidArgument

__all__ = ["Array", "check_sizes", "few_lengths", "next_half_step", "next_of", "next_power", "pad_or_stack", "pad_rows"]


Array: TypeAlias = npt.NDArray[Any]

_LENGTHS = (1, 2, 4, 8, 16, 32, 64)


def pad_rows(values: Array, lengths: Array, width: int, value: Any, side: str = "right") -> tuple[Array, Array]:
    """Return the rows in ``values``, one after the other, as one array of this width, and a mask of their places.

    >>> pad_rows(np.array([1, 2, 3]), np.array([2, 1]), 2, 0)[0].tolist()
    [[1, 2], [3, 0]]
    """
    places, lengths = np.arange(width), lengths[:, np.newaxis]
    mask = places < lengths if side == "right" else places >= width - lengths
    padded = np.full((*mask.shape, *values.shape[1:]), value, values.dtype)
    padded[mask] = values
    return padded, mask


def pad_or_stack(arrays: Sequence[Array] | Array, value: Any, few: bool = False) -> tuple[Array, Array | None]:
    """Return one array of all examples, and their lengths if they have any.

    Arrays of one shape are stacked, others are padded at the end of their first dimension.

    >>> pad_or_stack([np.array([1, 2, 3]), np.array([4])], 0)
    (array([[1, 2, 3],
           [4, 0, 0]]), array([3, 1]))
    """
    if isinstance(arrays, np.ndarray):
        return arrays, np.full(len(arrays), arrays.shape[1], np.int64) if arrays.ndim > 1 else None
    shapes = {array.shape for array in arrays}
    if len({shape[1:] for shape in shapes}) > 1 or len({len(shape) for shape in shapes}) > 1:
        first, second, *_ = sorted(shapes, key=str)
        raise InvalidArgument(
            f"found examples of the shapes {first} and {second} in one batch, expected that only the first dimension "
            "differs, which is padded",
            fix="resize the examples, for example with with_preprocess_fn",
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


def next_power(needed: int) -> int:
    """Return the next power of two.

    >>> [next_power(n) for n in (0, 1, 5, 64, 65)]
    [1, 1, 8, 64, 128]
    """
    return 1 << max(0, needed - 1).bit_length()


def next_half_step(needed: int) -> int:
    """Return the next power of two, or the value halfway between two of them: a quarter is padding at most, not half.

    >>> [next_half_step(n) for n in (1, 3, 5, 7, 64, 65, 100)]
    [1, 3, 6, 8, 64, 96, 128]
    """
    power = next_power(needed)
    middle = 3 * power // 4
    return middle if needed <= middle else power


def next_of(sizes: Sequence[int], needed: int) -> int:
    """Return the first of ``sizes`` that is large enough; beyond the last, a multiple of the last.

    >>> [next_of((8, 32), n) for n in (3, 9, 33, 65)]
    [8, 32, 64, 96]
    """
    return next((size for size in sizes if size >= needed), -(-needed // sizes[-1]) * sizes[-1])


def few_lengths(needed: int) -> int:
    """Return the length to which a batch is padded if code is compiled for each: finer steps than powers for long ones.

    >>> few_lengths(5), few_lengths(33), few_lengths(65)
    (8, 64, 128)
    """
    return next_of(_LENGTHS, needed)


def check_sizes(sizes: Sequence[int], option: str) -> tuple[int, ...]:
    """Return the sizes that a user passed, or raise an error that names the option.

    >>> check_sizes([8, 32], "lengths")
    (8, 32)
    """
    given = tuple(sizes)
    if not given or given[0] < 1 or any(first >= second for first, second in itertools.pairwise(given)):
        raise InvalidArgument(
            f"found {option}={sizes!r}, expected whole numbers from 1 on, each larger than the one before"
        )
    return given
