"""Several kernels, one test that keeps its level: each estimate in units of its own null, then a soft maximum.

The units and the maximum treat the data's own order as one permutation among the others, so that under the null
hypothesis its rank is uniform: nothing is paid for looking at many kernels but a little power (compare MMD-FUSE,
Biggs, Schrab and Gretton 2023, arXiv 2306.08777, which takes its units from the kernel's values instead).
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["fused"]

_SHARPNESS = 2.0  # towards the maximum; at 0 it would be the mean


def fused(observed: Any, null: Any) -> tuple[float, Any]:
    """The statistic of the data and of each permutation, from those of each kernel (first axis)."""
    every = np.concatenate([observed[:, None], null], axis=1)
    units = every.std(axis=1, keepdims=True)
    standard = _SHARPNESS * (every - every.mean(axis=1, keepdims=True)) / np.where(units > 0, units, 1)
    highest = standard.max(axis=0)
    together = (highest + np.log(np.exp(standard - highest).mean(axis=0))) / _SHARPNESS
    return float(together[0]), together[1:]
