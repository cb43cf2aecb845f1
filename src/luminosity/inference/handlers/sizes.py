"""Few sizes for many batches: a compiled model is compiled again for every new shape."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

__all__ = ["check_sizes", "few_lengths", "next_half_step", "next_of", "next_power"]

_LENGTHS = (1, 2, 4, 8, 16, 32, 64)


def next_power(needed: int) -> int:
    """The next power of two.

    >>> [next_power(n) for n in (0, 1, 5, 64, 65)]
    [1, 1, 8, 64, 128]
    """
    return 1 << max(0, needed - 1).bit_length()


def next_half_step(needed: int) -> int:
    """The next power of two, or the middle between two of them: a quarter of it is padding at most times, not half.

    >>> [next_half_step(n) for n in (1, 3, 5, 7, 64, 65, 100)]
    [1, 3, 6, 8, 64, 96, 128]
    """
    power = next_power(needed)
    middle = 3 * power // 4
    return middle if needed <= middle else power


def next_of(sizes: Sequence[int], needed: int) -> int:
    """The first of `sizes` that is enough; beyond the last, a multiple of it.

    >>> [next_of((8, 32), n) for n in (3, 9, 33, 65)]
    [8, 32, 64, 96]
    """
    return next((size for size in sizes if size >= needed), -(-needed // sizes[-1]) * sizes[-1])


def few_lengths(needed: int) -> int:
    """The length up to which a batch is padded where code is compiled for each: finer than powers for long ones.

    >>> few_lengths(5), few_lengths(33), few_lengths(65)
    (8, 64, 128)
    """
    return next_of(_LENGTHS, needed)


def check_sizes(sizes: Sequence[int], option: str) -> tuple[int, ...]:
    """The sizes a user gave, or an error that names the option.

    >>> check_sizes([8, 32], "lengths")
    (8, 32)
    """
    given = tuple(sizes)
    if not given or given[0] < 1 or any(first >= second for first, second in itertools.pairwise(given)):
        raise ValueError(f"found {option}={sizes!r}, expected whole numbers from 1 on, each larger than the one before")
    return given
