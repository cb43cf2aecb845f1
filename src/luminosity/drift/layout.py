"""Rows sorted by bin, and each bin filled up to whole groups, so that sums over groups are sums over parts of bins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """``order`` holds row numbers; where ``weights`` is zero stands a filler, which counts for nothing."""

    order: Any
    weights: Any
    bin_of_group: Any
    group: int

    @classmethod
    def of(cls, bins: Any, group: int) -> Layout:
        """For the bin of each row.

        >>> layout = Layout.of(np.array([1, 0, 1, 1]), group=2)
        >>> layout.order, layout.weights, layout.bin_of_group
        (array([1, 1, 0, 2, 3, 3]), array([1., 0., 1., 1., 1., 0.]), array([0, 1, 1]))
        """
        by_bin = np.argsort(bins, kind="stable")
        found, counts = np.unique(bins, return_counts=True)
        groups = -(-counts // group)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        filled_starts = np.concatenate([[0], np.cumsum(groups * group)[:-1]])
        position = np.arange(int(groups.sum()) * group) - np.repeat(filled_starts, groups * group)
        counts_here = np.repeat(counts, groups * group)
        within = np.minimum(position, counts_here - 1)
        return cls(
            order=by_bin[np.repeat(starts, groups * group) + within],
            weights=(position < counts_here).astype(np.float64),
            bin_of_group=np.repeat(found, groups),
            group=group,
        )
