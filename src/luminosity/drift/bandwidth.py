"""What distance counts as near: taken from distances of the pooled rows, which treats both samples alike.

A bandwidth taken from one sample alone would tell them apart, and the test would no longer keep its level.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from luminosity.errors import DriftError

__all__ = ["SAMPLE_ROWS", "median_of", "range_of"]

SAMPLE_ROWS = 1000  # rows whose distances are looked at: half a million pairs, the median is good to a percent


def median_of(distances: Any) -> float:
    """
    >>> median_of([0.0, 0.0, 0.0, 1.0, 2.0, 4.0])
    2.0
    """
    return float(np.median(_above_zero(distances)))


def range_of(distances: Any, count: int) -> list[float]:
    """So many bandwidths, each larger than the one before by the same factor, from half the smallest distances (but
    for a twentieth of them) to twice the largest.
    """
    low, high = np.quantile(_above_zero(distances), [0.05, 0.95])
    return [float(each) for each in np.geomspace(low / 2, 2 * high, count)]


def _above_zero(distances: Any) -> Any:
    """Many equal rows must not make the typical distance zero."""
    distances = np.asarray(distances)
    apart = distances[distances > 0]
    if len(apart) == 0:
        raise DriftError(
            "All rows looked at are equal, so that no distance is typical. Give the kernel a bandwidth; "
            "or perhaps the column is constant."
        )
    return apart
