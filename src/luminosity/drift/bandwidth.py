"""What distance counts as near: the median distance of the pooled rows, which treats both samples alike.

A bandwidth taken from one sample alone would tell them apart, and the test would no longer keep its level.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from luminosity.errors import DriftError

__all__ = ["SAMPLE_ROWS", "median_of"]

SAMPLE_ROWS = 1000  # rows whose distances are looked at: half a million pairs, the median is good to a percent


def median_of(distances: Any) -> float:
    """Of those above zero, so that many equal rows do not make it zero."""
    distances = np.asarray(distances)
    apart = distances[distances > 0]
    if len(apart) == 0:
        raise DriftError(
            "All rows looked at are equal, so that no distance is typical. Give the kernel a bandwidth; "
            "or perhaps the column is constant."
        )
    return float(np.median(apart))
