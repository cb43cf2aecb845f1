"""Sums of kernel values over the pairs of rows of one strip, or of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from luminosity.drift.block_sums import block_sums
from luminosity.drift.kernels import Kernel

__all__ = ["sums_between", "sums_within"]


def sums_within(kernels: Sequence[Kernel], offsets: Sequence[float], rows: Any, bins: Any, count: int) -> Any:
    """For each kernel a symmetric matrix over ordered pairs of different rows, by bin."""
    return block_sums(kernels, offsets, rows.__getitem__, bins, count)


def sums_between(
    kernels: Sequence[Kernel], offsets: Sequence[float], rows: tuple[Any, Any], bins: tuple[Any, Any], count: int
) -> Any:
    """The same over pairs of a row of the first strip and one of the second, in either order.

    Both may have rows of one bin. For a moment the second strip has bins of its own, so that pairs of the two are told
    from pairs within one.
    """
    both = np.concatenate(rows)
    apart = np.concatenate([bins[0], bins[1].astype(np.int64) + count])
    sums = block_sums(kernels, offsets, both.__getitem__, apart, 2 * count, boundary=count)
    between = sums[:, :count, count:]
    return between + between.transpose(0, 2, 1)
