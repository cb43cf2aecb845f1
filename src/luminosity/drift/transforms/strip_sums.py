"""Sums of kernel values over the pairs of rows of one strip, or of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from luminosity.drift.block_sums import block_sums
from luminosity.drift.kernels import Kernel

__all__ = ["sums_between", "sums_within"]


def sums_within(kernels: Sequence[Kernel], offsets: Sequence[float], rows: Any, bins: Any, count: int) -> Any:
    return block_sums(kernels, offsets, lambda numbers: rows[numbers], bins, count)


def sums_between(kernels: Sequence[Kernel], offsets: Sequence[float], rows: Any, bins: Any, count: int) -> Any:
    both = np.concatenate(rows), np.concatenate(bins)
    together = sums_within(kernels, offsets, *both, count)
    return together - sum(sums_within(kernels, offsets, rows[i], bins[i], count) for i in (0, 1))
