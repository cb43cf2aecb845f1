"""The maximum mean discrepancy (MMD) of two samples, and the test whether it is larger than chance explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from luminosity.drift.aggregate import Aggregate, as_kernels, one_kernel
from luminosity.drift.kernels import Kernel
from luminosity.drift.mmd_result import MMDTestResult
from luminosity.drift.pair import Pair
from luminosity.drift.permutation.conclude import Settings, conclude
from luminosity.drift.permutation.permute import estimates, observed_side
from luminosity.drift.result import Progress
from luminosity.drift.rows import Precision, check_precision, check_seed, has_same_rows
from luminosity.drift.sums.bins import BINS, BinCounts, plan_bins

__all__ = ["mmd2", "mmd_test"]


def mmd2(
    reference: Any,
    current: Any,
    kernel: Kernel | None = None,
    *,
    seed: int = 0,
    ids: tuple[Any, Any] | None = None,
    precision: Precision = "float32",
    progress: Progress | None = None,
) -> float:
    """Return the unbiased estimate of MMD², exact over all pairs of rows.

    It is around zero, and negative half of the time, if both samples come from the same distribution. If the kernel has
    no bandwidth, ``seed`` decides which rows it is chosen from; with ``ids`` of the rows, their hashes decide, as in a
    pipeline. ``progress`` is called with the number of tiles done and of all tiles.

    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(500, 3))
    >>> round(mmd2(x[:250], x[250:] + 1), 1)
    0.2
    """
    check_precision(precision)
    check_seed(seed)
    pair = Pair.of(reference, current, one_kernel(kernel), seed, precision, ids)
    bins = BinCounts(1, 1)
    counts = np.array([len(pair.reference), len(pair.current)])
    sums = pair.sums(np.repeat([0, 1], counts), bins, progress)
    return float(estimates(sums[0], counts.astype(np.float64), observed_side(bins)[None, :])[0])


def mmd_test(
    reference: Any,
    current: Any,
    kernel: Kernel | Aggregate | Sequence[Kernel | Aggregate] | None = None,
    *,
    permutations: int = 1000,
    level: float = 0.05,
    seed: int = 0,
    bins: int = BINS,
    ids: tuple[Any, Any] | None = None,
    precision: Precision = "float32",
    progress: Progress | None = None,
) -> MMDTestResult:
    """Test whether the two samples come from the same distribution.

    Rows are put into random bins, and the bins are permuted: one pass over the pairs of rows is enough for any number
    of permutations.

    Args:
      reference: a matrix with one row per example, or whatever NumPy takes as one.
      current: likewise; rows have as many numbers as the reference's.
      kernel: one kernel, or several, or an ``Aggregate`` of many bandwidths; all make one test that keeps its level.
        The default is ``RBF`` with the median distance.
      permutations: how many random permutations of the bins the statistic is compared with. With so few rows that
        there are no more permutations than this, each is tried once, and the p-value is exact.
      level: the false-alarm rate: how often drift is reported when there is none.
      seed: the seed of bins, permutations and of the rows that a bandwidth is chosen from.
      bins: the number of bins of both samples together.
      ids: the ids of the rows of both samples. Bins then come from hashes of the ids, as in a pipeline, and the order
        of rows does not matter.
      precision: the precision of the kernel's values; sums are always double.
      progress: called with the number of tiles done and of all tiles.

    If one sample has more than 1,023 times the rows of the other, random rows are left out, with a warning.

    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(500, 3))
    >>> mmd_test(x[:250], x[250:]).drift, mmd_test(x[:250], x[250:] + 1).drift
    (False, True)
    """
    settings = Settings(permutations, level, seed, precision)
    pair = Pair.of(reference, current, as_kernels(kernel), seed, precision, ids).thinned(seed)
    planned = plan_bins(len(pair.reference), len(pair.current), bins)
    of_rows = pair.bins(planned, seed)
    counts = np.bincount(of_rows, minlength=planned.all)
    found = conclude(pair.sums(of_rows, planned, progress), counts, planned, pair.kernels, settings)
    return replace(found, same_rows=has_same_rows(pair.reference, pair.current))
